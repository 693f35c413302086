"""``torch_ext conformance``: what agrees with the host, and with what upstream asks of a backend, on any device."""
