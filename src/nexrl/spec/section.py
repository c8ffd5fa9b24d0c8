"""What all sections of the experiment file are built from: value types, marks, and the class `Section`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Section(BaseModel):
    """A mapping of the experiment file. It is strict and frozen, and refuses unknown keys."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        strict=True,
        validate_default=True,
    )


def written(section: Section) -> dict[str, Any]:
    """The section as it is written to a file: with every default, and without a null that is one."""
    mapping = section.model_dump(mode="json", by_alias=True, exclude_none=True)
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), field.alias or name
        if isinstance(value, Section):
            mapping[key] = written(value)
        elif value is None and field.get_default() is not None:
            mapping[key] = None
    return mapping


# marks: what else is true of a field ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """Annotation of a field. It appears in the field's JSON schema as `key: value`; `nexrl.spec.marks` finds it."""

    key: str
    value: Any

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), self.key: self.value}


PATH = Mark("x-path", True)
"""The value is a path. A relative one starts at the folder of the file."""
CODE = "x-code"
"""Key of the marks of a value that may be a `module:name`, code of the user; their values say what it must be.
`nexrl validate` imports and checks it, see `nexrl.code_reference.unfit`; `nexrl submit` bundles it."""
FUNCTION = Mark(CODE, {"kind": "a function"})


def code(kind: str, *arguments: str, method: str = "") -> Mark:
    """Marks a `module:name` of code that is called with these arguments.

    `kind` is as in `nexrl.code_reference.is_a`. `method` is the method that a class must have, as in `has_method`.
    """
    return Mark(CODE, {"kind": kind, "arguments": list(arguments), "method": method})


MAY_CHANGE = "x-may-change"
"""Key of the marks below. Fields without such a mark may change while the experiment is suspended."""
LIVE = Mark(MAY_CHANGE, "live")
"""May change at any time and takes effect at once; at the top of the spec, also while the rest is invalid."""
ROLLING = Mark(MAY_CHANGE, "rolling")
"""May change at any time; the operator then replaces the pods one by one."""
NEXT_START = Mark(MAY_CHANGE, "next start")
"""May change at any time; takes effect when the experiment starts, or starts again after a suspension."""
NEVER = Mark(MAY_CHANGE, "never")
"""Identifies the experiment: a different value needs a new Experiment."""
WRITTEN_OUT = "x-written-out"


def written_out(*defaults: Any) -> Mark:
    """Marks a variant's key that every variant once had, with its defaults then.

    Stored objects of that time contain these values in sections of other variants; reading drops them.
    """
    return Mark(WRITTEN_OUT, list(defaults))


# types of values -----------------------------------------------------------------------------------------------------

REFERENCE_PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"

Text = Annotated[str, Field(max_length=4096)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Location = Annotated[str, Field(min_length=1, max_length=1024), PATH]
Reference = Annotated[str, Field(pattern=f"^{REFERENCE_PATTERN}$", max_length=256), FUNCTION]
"""A `module:name` of a function. A mark with the key CODE after it says that something else is needed."""
Seconds = Annotated[float, Field(gt=0, le=604_800)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Limit = Annotated[float, Field(gt=0, le=1e9)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000_000)]
Replicas = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Device = Literal["auto", "cpu", "cuda"]
Gpus = tuple[Annotated[int, Field(ge=0, le=1023)], ...]


@dataclass(frozen=True)
class NameOrReference:
    """Annotation of a text: it is one of `names`, or a `module:name` of the user, as in `Reference`."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.str_schema(pattern=self.pattern, max_length=256)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "x-names": list(self.names), CODE: FUNCTION.value}

    @property
    def pattern(self) -> str:
        """What the text must match."""
        return f"^({'|'.join(self.names)}|{REFERENCE_PATTERN})$"


# rules ---------------------------------------------------------------------------------------------------------------


def refuse(reason: str) -> PydanticCustomError:
    """The error to raise in the validator of a field; `reason` says what is allowed."""
    return PydanticCustomError("rule", "{message}", {"message": reason})


def refuse_key(key: str, value: object, reason: str) -> PydanticCustomError:
    """The error to raise in the validator of a section, about the value of one of its keys."""
    return PydanticCustomError("rule", "{message}", {"message": reason, "key": key, "value": value})


def with_port(url: str | None) -> str | None:
    """Returns the URL if its host and port can be separated and its port is not 0, else raises `refuse`."""
    try:
        port = urlsplit(url or "").port
    except ValueError as error:
        raise refuse(f"host or port is invalid ({error}); use HOST:PORT with a port from 1 to 65535") from None
    if port == 0:
        raise refuse("port is 0; use a port from 1 to 65535")
    return url
