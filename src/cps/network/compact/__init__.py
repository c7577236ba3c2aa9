"""A subnetwork as a small network of its own."""
