"""A jinja2 environment for untrusted templates: no side effects, and bounded work and memory.

Invariant: every loop turn, call, filter, test and built string is charged to the render's budget *before* or
as it is made, so a hostile template ends in `TooCostly` after at most about two seconds.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000
MAX_CPU_SECONDS = 2.0
MAX_STRING = 4 * 2**20  # characters of one string, and of the rendered text
MAX_BUILT = 64 * 2**20  # characters of all strings built by one render
MAX_LENGTH = 100_000  # elements of one list
MAX_NODES = 500_000  # elements of a nested list or dict, shared ones counted each time
MAX_INT_BITS = 4_096
MAX_INDENT = 64
SIZED = (str, list, tuple)
STR_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace
    istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition
    rsplit rstrip split splitlines startswith strip swapcase title upper"""
SAFE_ATTRIBUTES: dict[type, list[str]] = {str: STR_METHODS.split(), int: [], float: []}
SAFE_ATTRIBUTES |= {list: ["index", "count", "copy"], tuple: ["index", "count"]}
SAFE_ATTRIBUTES[dict] = ["get", "items", "keys", "values", "copy"]
# Filters that look at the top of their input only; all others are charged for every element below it.
SHALLOW_FILTERS = """
    count d default first items last length list map reject rejectattr reverse safe select selectattr"""
DEEP_FILTERS = """
    abs attr capitalize dictsort e escape float groupby indent int join lower max min replace round sort
    string title tojson trim unique upper wordcount"""


class TooCostly(Exception):
    """The template asked for more than a chat can need."""


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise TooCostly(f"it builds a value of more than {limit} parts")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Only the known filters stay, `filters` replace some of them, and templates may call `functions`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extensions: Sequence[Any], filters: dict[str, Any], functions: dict[str, Any]) -> None:
        # Not optimized: constants would be folded, hence work done, before there is a budget.
        options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "optimized": False}
        super().__init__(extensions=extensions, finalize=_charged_output, **options)
        self.lock = threading.Lock()  # one render at a time: the budget is the environment's
        self.steps_left, self.chars_left, self.deadline = 0, 0, 0.0  # until a render begins
        self.num_literal = 0  # characters of plain text in the template
        del self.globals["lipsum"]
        self.globals.update(functions)
        self.filters.update(filters)
        shallow, deep = SHALLOW_FILTERS.split(), DEEP_FILTERS.split()
        known = [name for name in shallow + deep if name in self.filters]  # not all in every jinja2
        self.filters = {name: self._charged(self.filters[name], name in deep) for name in known}
        self.filters["join"] = self.joined
        self.tests = {name: self._charged(test, is_deep=True) for name, test in self.tests.items()}

    def render(self, template: Template, variables: dict[str, Any]) -> str:
        with self.lock:
            self.steps_left, self.chars_left = MAX_STEPS, MAX_BUILT
            self.deadline = time.thread_time() + MAX_CPU_SECONDS
            return template.render(variables)

    def charge(self, steps: int, chars: int = 0) -> None:
        self.steps_left -= steps
        self.chars_left -= chars
        if self.steps_left < 0 or self.chars_left < 0 or time.thread_time() > self.deadline:
            raise TooCostly("it loops or repeats text without end")

    def built(self, value: Any) -> Any:
        """Charge for a fresh value."""
        if isinstance(value, str):
            _check(len(value), MAX_STRING)
            self.charge(1, len(value))
        elif isinstance(value, (list, tuple, dict)):
            _check(len(value), MAX_LENGTH)
            self.charge(1 + len(value))
        return value

    def weighed(self, value: Any) -> Any:
        """Charge for all elements of a nested value; it may share parts, and so be larger than its memory."""
        if not isinstance(value, (list, tuple, dict)):
            return value
        stack, count = [value], 0
        while stack:
            part = stack.pop()
            count += 1
            _check(count + len(stack), MAX_NODES)
            if isinstance(part, Mapping):
                stack.extend(part.values())
            elif isinstance(part, (list, tuple)):
                stack.extend(part)
        self.charge(count)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in SAFE_ATTRIBUTES.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.charge(1, __self.num_literal if isinstance(__obj, Macro) else 0)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            __self.check_replace(owner, *args[:2])
        if isinstance(owner, str) and name == "join" and args:
            return __self.joined(args[0], owner)
        return __self.built(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check(int(abs(right)) if isinstance(right, (int, float)) else 2**62, 64)
            _check(left.bit_length() if isinstance(left, int) else 0, 64)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, SIZED) and isinstance(times, int):
                    _check(len(value) * max(times, 0), MAX_STRING if isinstance(value, str) else MAX_LENGTH)
            if isinstance(left, int) and isinstance(right, int):
                _check(left.bit_length() + right.bit_length(), MAX_INT_BITS)
        elif operator == "%" and isinstance(left, str):
            if re.search(r"\*|\d{4}", left):
                raise TooCostly("it formats with a width of four digits or more")
            self.weighed(right)
        elif operator == "+" and isinstance(left, SIZED) and isinstance(right, SIZED):
            _check(len(left) + len(right), MAX_STRING)
        return self.built(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> None:
        """No str.format: its widths may themselves be arguments."""

    def check_replace(self, s: Any, old: Any, new: Any, count: Any = None) -> None:
        text = str(s)
        _check(len(text) + text.count(str(old)) * len(str(new)), MAX_STRING)

    def turns(self, values: Iterable[Any], num_literal: int) -> Iterator[Any]:
        """What every for loop runs over; `num_literal` characters of plain text are in its body."""
        for value in values:
            self.charge(1, num_literal)
            yield value

    def joined(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
        if attribute is not None:
            values = (self.getitem(value, attribute) for value in values)
        texts = [str(self.weighed(value)) for value in self.turns(values, 0)]
        _check(sum(map(len, texts)) + len(d) * len(texts), MAX_STRING)
        return self.built(str(d).join(texts))

    def _charged(self, function: Any, is_deep: bool) -> Callable[..., Any]:
        name = function.__name__

        @wraps(function)  # keeps jinja2's mark of what is passed first
        def charged(*args: Any, **kwargs: Any) -> Any:
            self.charge(1)
            if is_deep:
                for value in (*args, *kwargs.values()):
                    self.weighed(value)
            if name == "do_replace":
                self.check_replace(*args[1:], **kwargs)
            if name == "do_indent":
                width = args[1] if len(args) > 1 else kwargs.get("width", 4)
                _check(len(width) if isinstance(width, str) else int(width), MAX_INDENT)
            return self.built(function(*args, **kwargs))

        return charged

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        self.num_literal = _num_literal(source)
        bounded = _Bounding().visit(source)
        bounded.set_environment(self)
        return super()._generate(bounded, *args, **kwargs)


@pass_context
def _charged_output(context: Context, value: Any) -> Any:
    environment = context.environment
    assert isinstance(environment, BoundedEnvironment), "finalize runs in its own environment"
    return environment.built(value if isinstance(value, str) else str(environment.weighed(value)))


def _num_literal(node: nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


class _Bounding(NodeTransformer):
    """Rewrites what no hook of jinja2 sees: loops, `~`, list and dict literals, comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TooCostly(f"line {node.lineno} has a recursive loop, which is not supported")
        num_literal = _num_literal(node)
        self.generic_visit(node)
        node.iter = _call("turns", [node.iter, nodes.Const(num_literal)], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", [nodes.List(node.nodes)], node.lineno)

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"  # {% for key, value in ... %}
        return node if is_target else _call("weighed", [node], node.lineno)

    visit_Dict = visit_Tuple = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        holders: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        for holder in holders:
            if not isinstance(holder.expr, nodes.Const):
                holder.expr = _call("weighed", [holder.expr], node.lineno)
        return node


def _call(method: str, arguments: Sequence[nodes.Node], lineno: int) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)
    return call.set_lineno(lineno, override=False)  # type: ignore[return-value]
