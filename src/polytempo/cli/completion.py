"""Shell completion: `polytempo --install-completion`. Commands and options are typer's; here is what it does not know."""

from __future__ import annotations

from collections.abc import MutableMapping

from polytempo.sync.spec import mode_examples

#: Says, in the environment of a completion, which shell asks. The name is typer's.
ASKING = "_POLYTEMPO_COMPLETE"


def complete_mode(incomplete: str) -> list[tuple[str, str]]:
    """What `--sync` may be, with its meaning; nothing behind a colon, where bash would not replace the name before it."""
    return [] if ":" in incomplete else list(mode_examples().items())


def join_broken_words(environment: MutableMapping[str, str]) -> None:
    """Put together what bash broke at a colon or an equals sign: typer would take the rest of `ssp:3` for the script."""
    if environment.get(ASKING) != "complete_bash":
        return
    words = [""]
    current = int(environment["COMP_CWORD"])
    place = current
    for number, word in enumerate(environment["COMP_WORDS"].split("\n")):
        if number and (_is_break(word) or _is_break(words[-1][-1:])):
            words[-1] += word
            place -= number <= current
        else:
            words.append(word)
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "\n".join(words[1:]), str(place)


def _is_break(word: str) -> bool:
    return bool(word) and not word.strip(":=")
