"""vLLM side: registers the weight-transfer engine `fsdp_ipc` in every vLLM process."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`."""
