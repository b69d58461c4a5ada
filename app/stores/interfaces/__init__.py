"""The stores' promises. Every implementation passes the suites in tests/conformance/."""
