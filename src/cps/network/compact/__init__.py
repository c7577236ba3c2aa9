"""A subnetwork as a compact network that holds only the channels it uses."""
