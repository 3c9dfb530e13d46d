"""Models that are split over ranks, each compared with the same model in one process."""
