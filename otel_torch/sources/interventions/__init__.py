"""Changes a run on purpose: noise, double precision, the reference's values."""
