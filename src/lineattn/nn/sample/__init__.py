"""Methods of the sample axis: positions attend to memories that all samples share, and what that is compared with."""
