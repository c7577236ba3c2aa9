"""Methods with a subnetwork for each task."""
