# SPDX-License-Identifier: Apache-2.0
"""Turns VERSIONS.lock, patches/ and overlay/ into a patched wheel."""
