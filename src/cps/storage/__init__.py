"""Files that survive crashes and refuse damage."""
