"""``torch_ext mutate``: makes small faults in a package, one at a time, and shows those that no test notices."""
