"""Where settings come from: a YAML file, the environment, the caller. Each source remembers where a value stood."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel

from gateway.settings_errors import PREFIX, Problem, SettingsError
from gateway.settings_schema import Key, accepts_none, container_of, field_at, keys_of

NOT_SETTINGS = frozenset({"LIMPET_CONFIG", "LIMPET_GPU", "LIMPET_LOG_FILE", "LIMPET_PYTHON", "LIMPET_RUN"})
PLAIN_TAGS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
DEPTH = 32


class Source(Protocol):
    """Some values, nested, and where each came from."""

    values: dict[str, Any]

    def origin(self, key: Key) -> str:
        """Where the value of `key` came from, for a person."""
        ...


class Given:
    """Values passed by the caller."""

    def __init__(self, values: Mapping[str, Any], label: str) -> None:
        self.values: dict[str, Any] = dict(values)
        self._label = label

    def origin(self, key: Key) -> str:  # noqa: ARG002 - one place for all
        """The caller's own word for itself."""
        return self._label


class YamlFile:
    """A YAML file whose keys remember their line and column. Duplicate keys are errors, unlike in plain PyYAML."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._marks: dict[Key, yaml.Mark] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
            raise SettingsError([Problem("settings file", str(path), str(reason), "a readable YAML file")]) from None
        self.values: dict[str, Any] = self._parse(text)

    def origin(self, key: Key) -> str:
        """`file:line:column` of the key, or of the nearest one around it."""
        while key and key not in self._marks:
            key = key[:-1]
        mark = self._marks.get(key)
        return f"{self._path}:{mark.line + 1}:{mark.column + 1}" if mark else str(self._path)

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            value = {} if node is None else self._value(loader, node, ())
        except yaml.MarkedYAMLError as error:
            # Quoted in it are words of the file, which may be secrets.
            problem = re.sub(r"'.*'", "…", error.problem or "not YAML", flags=re.DOTALL)
            raise self._broken(error.problem_mark or error.context_mark, problem) from None
        except yaml.reader.ReaderError as error:
            raise SettingsError(
                [Problem("settings file", str(self._path), f"{error.reason} at position {error.position}", "YAML text")]
            ) from None
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise SettingsError(
                [
                    Problem(
                        "settings file",
                        str(self._path),
                        f"a {type(value).__name__} at the top",
                        "a mapping of sections",
                    )
                ]
            )
        return value

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node, key: Key) -> Any:
        if len(key) > DEPTH:
            raise self._broken(node.start_mark, f"more than {DEPTH} levels deep")
        if isinstance(node, yaml.CollectionNode) and node.tag not in PLAIN_TAGS:
            raise self._broken(node.start_mark, "a tag that is not known")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._marks[(*key, index)] = item.start_mark
            return [self._value(loader, item, (*key, index)) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node, deep=True)
        seen: dict[str, yaml.Mark] = {}
        for name, _ in node.value:  # before `<<` is resolved: what it brings may be overridden
            if name.value in seen and name.tag != "tag:yaml.org,2002:merge":
                raise self._broken(name.start_mark, f"a key again; first in line {seen[name.value].line + 1}")
            seen[name.value] = name.start_mark
        loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for name, item in node.value:
            text = str(loader.construct_object(name, deep=True))
            self._marks[(*key, text)] = name.start_mark
            values[text] = self._value(loader, item, (*key, text))
        return values

    def _broken(self, mark: yaml.Mark | None, problem: str) -> SettingsError:
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        origin = f"{self._path}:{mark.line + 1}:{mark.column + 1}" if mark else str(self._path)
        return SettingsError([Problem("settings file", origin, f"{where}{problem}", "YAML")])


class Environ:
    """`LIMPET_SECTION__KEY` variables. Lists and mappings are YAML or JSON text; a list of words may use commas."""

    def __init__(self, environ: Mapping[str, str], model: type[BaseModel]) -> None:
        self._model = model
        self._names: dict[Key, str] = {}
        self.values: dict[str, Any] = {}
        for name, text in sorted(environ.items()):
            if name.startswith(PREFIX) and name not in NOT_SETTINGS:
                self._take(name, text)

    def origin(self, key: Key) -> str:
        """The name of the variable that set the key, something around it, or something in it."""
        inside = (name for known, name in self._names.items() if known[: len(key)] == key)
        around = (self._names[key[:end]] for end in range(len(key), 0, -1) if key[:end] in self._names)
        return next(around, None) or next(inside, "environment")

    def _take(self, name: str, text: str) -> None:
        key: Key = tuple(name.removeprefix(PREFIX).lower().split("__"))
        field = field_at(self._model, key)
        if field is None and len(key) == 1 and not self._resembles(str(key[0])):
            return  # another program's variable, or one of ours that is no setting
        self._names[key] = name
        target = self.values
        for part in key[:-1]:
            inner = target.setdefault(str(part), {})
            if not isinstance(inner, dict):  # LIMPET_SERVER and LIMPET_SERVER__PORT together
                raise SettingsError(
                    [Problem(".".join(map(str, key)), name, "both", "one variable, not one inside another")]
                )
            target = inner
        target[str(key[-1])] = self._parsed(field, text, name, key)

    def _parsed(self, field: Any, text: str, name: str, key: Key) -> Any:
        if field is None:
            return text
        if accepts_none(field) and text.strip().lower() in {"", "null", "none"}:
            return None
        kind = container_of(field)
        if kind is None:
            return text
        if kind == "words" and not text.lstrip().startswith("["):
            return [word.strip() for word in text.split(",") if word.strip()]
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            allowed = 'JSON or YAML, e.g. [{"name": "m"}]'
            found = f"{len(text)} characters that can't be read"  # which may be keys, or hold some
            raise SettingsError([Problem(".".join(map(str, key)), name, found, allowed)]) from None

    def _resembles(self, word: str) -> bool:
        leaves = {str(key[-1]) for key in keys_of(self._model)} | set(self._model.model_fields)
        return bool(difflib.get_close_matches(word, leaves, n=1, cutoff=0.8))


def merged(sources: Sequence[Source]) -> dict[str, Any]:
    """All values, later sources over earlier ones; mappings are merged, everything else is replaced."""
    result: dict[str, Any] = {}
    for source in sources:
        result = _over(result, source.values)
    return result


def _over(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for name, value in high.items():
        below = result.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[name] = _over(below, value) if both else value  # type: ignore[arg-type]
    return result
