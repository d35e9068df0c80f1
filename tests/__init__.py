"""Tests of `fsdp_ipc`; a package, so that rank processes can import the test functions by name."""
