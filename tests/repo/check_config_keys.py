"""The frozen list of configuration keys: other people's YAML files and commands hang on them.

    python tests/repo/check_config_keys.py            show what changed
    python tests/repo/check_config_keys.py --write    accept the change
"""

import sys
import types
import typing
from pathlib import Path

FROZEN = Path(__file__).with_name("config_keys.txt")
sys.path.insert(0, str(FROZEN.parents[2]))


def field_lines(model: type, prefix: str = "") -> list[str]:
    "One line a key: its dotted name and type; a section's fields follow it."
    lines = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
            lines += field_lines(field.annotation, f"{prefix}{name}.")
        else:
            lines.append(f"{prefix}{name}: {type_name(field.annotation)}")
    return lines


def type_name(annotation: object) -> str:
    "A type as one would write it; the limits of a number are left out, the choices of a word are not."
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return "|".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(type_name, arguments)).replace("NoneType", "None")
    if arguments:
        return f"{origin.__name__}[{', '.join(map(type_name, arguments))}]"
    return getattr(annotation, "__name__", str(annotation))


def current_keys() -> list[str]:
    from llm_from_scratch.config import Config

    return sorted(field_lines(Config))


def changes() -> list[str]:
    frozen = FROZEN.read_text(encoding="utf-8").splitlines() if FROZEN.exists() else []
    current = current_keys()
    gone = [f"gone: {line}" for line in frozen if line not in current]
    return gone + [f"new: {line}" for line in current if line not in frozen]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FROZEN.write_text("\n".join(current_keys()) + "\n", encoding="utf-8")
    print("\n".join(changes()) or "the keys are the frozen ones")
