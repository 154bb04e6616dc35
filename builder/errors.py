# SPDX-License-Identifier: Apache-2.0
"""The family of errors that end a command with one line and a documented exit status."""


class BuildError(Exception):
    """What was expected, what was found, what to do; `status` is the exit status of build.py."""

    status = 1

    def __init__(self, subject: str, *, expected: str, found: str, do: str) -> None:
        super().__init__(f"{subject}: expected {expected}, found {found}; {do}")


class UsageProblem(BuildError):
    """An argument or an environment variable holds a value that is not allowed."""

    status = 2


class InputProblem(BuildError):
    """An input is missing or is not the pinned one."""

    status = 3


class PatchProblem(BuildError):
    """A patch or the overlay does not fit the pinned release, or lacks something."""

    status = 4


class ImageProblem(BuildError):
    """No image could be built."""

    status = 5


class StepProblem(ImageProblem):
    """A step inside the image ended with this line, which says all."""

    def __init__(self, line: str) -> None:
        Exception.__init__(self, line)
