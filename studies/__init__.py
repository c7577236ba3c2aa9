"""Studies: the published runs, ablations and settings, and the tables and plots of the documentation."""
