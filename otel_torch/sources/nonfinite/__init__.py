"""Who produced the first NaN or Inf of a run."""
