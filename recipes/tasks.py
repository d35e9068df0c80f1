"""Tasks whose answers a program can judge: prompts, and the reward of a completion."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config import DataConfig

_JSONL = "a file of JSON lines, each an object with 'prompt' and 'answer'"
_TEXT = "a text file (UTF-8) to learn"


@dataclass(frozen=True)
class Problem:
    """A prompt, and what its answer is judged by."""

    prompt: str
    answer: str = ""


@dataclass(frozen=True)
class Task:
    """Problems without end, and their judge.

    Attributes:
        draw: Makes a problem from a random generator.
        reward: Judges a completion of a problem, from 0 to 1.
    """

    draw: Callable[[random.Random], Problem]
    reward: Callable[[Problem, str], float]


def task_of(config: DataConfig) -> Task:
    """The task of the settings.

    Raises:
        ValueError: A file without problems, or a line of it that is none, by its number.
    """
    if config.kind == "letters":
        return Task(lambda _: Problem(config.prompt), lambda _, text: share_of_letters(text))
    if config.kind == "sums":
        return Task(_sum, lambda problem, text: number_reward(problem.answer, text))
    problems = read_problems(Path(config.path or ""))
    return Task(lambda source: source.choice(problems), lambda p, text: answer_reward(p.answer, text))


def share_of_letters(text: str) -> float:
    """The share of small letters among a completion's characters: so easy that an untrained model learns it."""
    return sum("a" <= c <= "z" for c in text) / len(text) if text else 0.0


def number_reward(answer: str, text: str) -> float:
    """1 if a completion begins with the right number; a tenth if it begins with any."""
    found = re.match(r"\s*(-?\d+)", text)
    if found is None:
        return 0.0
    return 1.0 if int(found.group(1)) == int(answer) else 0.1


def answer_reward(answer: str, text: str) -> float:
    """1 if a completion's last number, or else the text itself, is the answer."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    last = numbers[-1] if numbers else ""
    return 1.0 if answer.strip() in (last, text.strip()) else 0.0


def read_problems(path: Path) -> list[Problem]:
    """Read a JSONL file: an object a line, with texts `prompt` and `answer`; an `answer` may be a number.

    Raises:
        ValueError: The file is missing or empty, or a line is no such object.
    """
    problems = []
    # Not `splitlines`, which cuts at characters that JSON allows inside of a text.
    for number, line in enumerate(read_file(path, _JSONL).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            problems.append(_problem(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"data.path={str(path)!r}, line {number}: expected an object with 'prompt' and 'answer', got {line[:200]!r}"
            ) from error
    if not problems:
        raise ValueError(f"data.path={str(path)!r}: no problems in it; expected {_JSONL}")
    return problems


def read_file(path: Path, expected: str) -> str:
    """Read the text of the file at `data.path`.

    Args:
        path: The file, UTF-8.
        expected: What it should be, for the message.

    Raises:
        ValueError: It is missing, no file, can't be read or is not UTF-8.
    """
    if not path.is_file():
        what = "a directory" if path.is_dir() else "not a file" if path.exists() else "no such file"
        raise ValueError(f"data.path={str(path)!r}: {what}; expected {expected}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"data.path={str(path)!r}: {error.strerror}; expected {expected}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"data.path={str(path)!r}, line {line}: not UTF-8; expected {expected}") from error


def check_data(config: DataConfig) -> None:
    """Read the file of the settings, if there is one, so that it is refused before anything is started.

    Raises:
        ValueError: Names `data.path`, the file, what is expected and, where a line is wrong, its number.
    """
    if config.path is None:
        return
    if config.kind == "jsonl":
        read_problems(Path(config.path))
    elif config.kind == "text" and not read_file(Path(config.path), _TEXT).strip():
        raise ValueError(f"data.path={config.path!r}: nothing in it; expected {_TEXT}")
    elif config.kind not in ("jsonl", "text"):
        raise ValueError(f"data.path={config.path!r}: data.kind={config.kind} reads no file; leave it out")


def _problem(entry: Any) -> Problem:
    prompt, answer = entry["prompt"], entry["answer"]
    if not isinstance(prompt, str) or not isinstance(answer, str | int | float):
        raise TypeError
    return Problem(prompt, str(answer))


def _sum(source: random.Random) -> Problem:
    first, second = source.randrange(10), source.randrange(10)
    return Problem(f"{first}+{second}=", str(first + second))
