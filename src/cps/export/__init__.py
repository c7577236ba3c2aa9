"""Export subnetworks to files for programs that do not use cps."""
