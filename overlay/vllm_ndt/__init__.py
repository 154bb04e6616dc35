# SPDX-License-Identifier: Apache-2.0
"""What the patched vLLM wheel adds beside vLLM: the bodies of its patches and the command `vllm-ndt`.

Importing this package imports nothing else, so that `vllm-ndt verify` answers even where vllm or torch is broken.
"""
