"""Whole jobs on top of `fsdp_ipc`; not part of the installed package."""
