"""The reference: finds the public names of both packages, and writes one page of the site for each subpackage.

Public is what the `__all__` of a package lists. A listed module without `__all__` has the public names that it
defines. Each name is described once, on the first page that lists it; tables on the other pages link to it.

Finding names needs no Sphinx, so that the tests do it too. `setup` is what the site's `conf.py` calls.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"

#: Modules with a page of their own, in the order of the reference.
PAGES = (
    "gyroscope",
    "gyroscope.monitor",
    "gyroscope.store",
    "gyroscope.diagnosis",
    "gyroscope.control",
    "gyroscope.control.rates",
    "gyroscope.conditioning",
    "gyroscope.theory",
    "gyroscope.layers",
    "gyroscope.vectors",
    "gyroscope.figures",
    "gyroscope.page",
    "gyroscope.integrations",
    "gyroscope.errors",
    "gyroscope_lab",
)
#: Modules that are sections of a page, and that the page's `__all__` does not list.
SECTIONS = {
    "gyroscope.integrations": [
        f"gyroscope.integrations.{framework}"
        for framework in ("transformers", "accelerate", "lightning", "keras", "optax", "optuna", "ray")
    ],
    "gyroscope_lab": [f"gyroscope_lab.{part}" for part in ("data", "models", "training", "engine")],
}


@dataclass(frozen=True)
class Name:
    """A public name.

    Attributes:
        module: the module that lists it.
        name: its name there.
        value: what it stands for.
    """

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """The dotted path."""
        return f"{self.module}.{self.name}"

    @property
    def sort(self) -> str:
        """The kind of object, as autodoc calls it."""
        if isinstance(self.value, type):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if inspect.isroutine(inspect.unwrap(self.value)) else "data"

    @property
    def text(self) -> str:
        """The docstring, or the comment `#:` above a constant."""
        return inspect.cleandoc(self.value.__doc__ or "") if self.sort != "data" else _comment(self.module, self.name)


def names(module: str) -> list[Name]:
    """Return the public names of a module that are not modules, in the order of the alphabet.

    >>> [name.name for name in names("gyroscope.vectors")]
    ['backend', 'combine_', 'dots', 'local']
    """
    there = import_module(module)
    listed = getattr(there, "__all__", None) or [
        name
        for name, value in vars(there).items()
        if name[:1] != "_" and inspect.isroutine(value) | isinstance(value, type) and value.__module__ == module
    ]
    found = [Name(module, name, getattr(there, name)) for name in sorted(listed, key=str.lower)]
    return [name for name in found if not isinstance(name.value, ModuleType)]


def sections(page: str) -> list[str]:
    """Return the modules that are sections of a page: public modules of its package that have no page.

    >>> sections("gyroscope.conditioning")
    ['gyroscope.conditioning.curvature', 'gyroscope.conditioning.fisher']
    """
    if page in SECTIONS:
        return SECTIONS[page]
    package = import_module(page)
    modules = [name for name in getattr(package, "__all__", ()) if isinstance(getattr(package, name), ModuleType)]
    return [f"{page}.{name}" for name in modules if f"{page}.{name}" not in PAGES]


@cache
def homes() -> dict[int, Name]:
    """Return the place where each public object is described, by the object's identity."""
    found: dict[int, Name] = {}
    for page in PAGES:
        for module in (page, *sections(page)):
            for name in names(module):
                found.setdefault(id(name.value), name)
    return found


def home(name: Name) -> Name:
    """Return the place where a name is described. Constants of equal value may be one object, and stay apart."""
    return name if name.sort == "data" else homes()[id(name.value)]


def _comment(module: str, name: str) -> str:
    """Return the comment `#:` above the assignment of a constant, in the module or the file it comes from."""
    value, package = getattr(import_module(module), name), module.partition(".")[0]
    for path, there in list(sys.modules.items()):
        if path.partition(".")[0] == package and vars(there).get(name) is value:
            source = Path(str(there.__file__)).read_text(encoding="utf-8")
            above = re.search(rf"((?:^#: .*\n)+){name}\b[^=\n]*=", source, re.MULTILINE)
            if above:
                return re.sub(r"^#: ", "", above[1], flags=re.MULTILINE).strip()
    raise LookupError(f"{module}.{name} has no comment `#:` above it.")


# ---------------------------------------------------------------------------------------------------------------------
# Docstrings: Markdown in the text, Google style in the sections; reStructuredText reads `code`, |x| and w_ differently.


def inline(text: str) -> str:
    """Return a line of a docstring as reStructuredText.

    >>> inline("`Layca`s with |cos| of w_ and *emphasis*")
    '``Layca``\\\\ s with \\\\|cos\\\\| of w\\\\_ and *emphasis*'
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a lone backtick
        return text.replace("`", "\\`")
    for i, part in enumerate(parts):
        if i % 2:
            after = parts[i + 1][:1]
            parts[i] = f"``{part}``" + ("\\ " if after.isalnum() or after == "_" else "") if part else ""
        else:
            kept = re.sub(r"(?<![\w*])\*(\w[^*]*)\*(?![\w*])", "\0\\1\0", part)  # emphasis
            kept = re.sub(r"([|*\\]|_(?!\w))", r"\\\1", kept).replace("\0", "*")
            parts[i] = re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`docs/\1.md </\1>`", kept)
    return "".join(parts)


def restructured(lines: list[str]) -> list[str]:
    """Return a docstring's lines as reStructuredText; sections and examples stay as they are.

    >>> restructured(["A law:", "", "    y = x_    (1)", "", ">>> f(`x`)"])
    ['A law:', '', '::', '', '    y = x_    (1)', '', '>>> f(`x`)']
    """
    out: list[str] = []
    in_example = in_section = in_formula = False
    for line in lines:
        blank = not line.strip()
        in_section = in_section or bool(re.fullmatch(r"[A-Z]\w+:", line))
        in_example = not blank and (in_example or line.lstrip().startswith(">>>"))
        indented = line.startswith("    ") and not in_section and not in_example
        starts = indented and not in_formula and (not out or not out[-1].strip())
        if starts:
            out += ["::", ""]
        in_formula = (indented and (starts or in_formula)) or (blank and in_formula)
        out.append(line if blank or in_example or in_formula else inline(line))
    return out


def first_line(text: str) -> str:
    """Return the first sentence of a docstring, as reStructuredText.

    >>> first_line("Return `x`.")
    'Return ``x``.'
    """
    return inline(" ".join(text.split("\n\n")[0].split()))


# ---------------------------------------------------------------------------------------------------------------------
# Pages.


def page_file(module: str) -> Path:
    """Return the file of a page."""
    return HERE / f"{module}.rst"


def page_text(module: str) -> str:
    """Return the page of a module."""
    return "\n".join(_lines(module)) + "\n"


def _lines(page: str) -> Iterator[str]:
    yield from _section(page, "=")
    for module in sections(page):
        yield from ("", "")
        yield from _section(module, "-")


def _section(module: str, underline: str) -> Iterator[str]:
    yield from (module, underline * len(module), "")
    yield from restructured(inspect.cleandoc(import_module(module).__doc__ or "").splitlines())
    yield ""
    listed = names(module)
    if listed:
        yield from (".. list-table::", "   :class: names", "   :widths: auto", "")
        for name in listed:
            at = home(name)
            short = name.name if at.module == module else at.path
            yield f"   * - :py:obj:`{short} <{at.path}>`"
            yield f"     - {first_line(at.text)}"
        yield ""
    for name in listed:
        if home(name).module != module:
            continue
        if name.sort == "data":
            yield from (f".. py:data:: {name.path}", "", f"   {first_line(name.text)}", "")
        else:
            yield f".. auto{name.sort}:: {module}::{name.name}"
            if name.sort == "class":
                yield "   :members:"
            yield ""


# ---------------------------------------------------------------------------------------------------------------------
# Sphinx.


class _StandIn(ModuleType):
    """A module or a function of a framework that is not installed; its names with a capital are classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__}) if name[0].isupper() else _StandIn(name)
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **options: Any) -> Any:
        return lambda decorated: decorated


def import_adapters() -> None:
    """Import the adapters, also where their frameworks are not installed: the reference needs their docstrings."""
    needed = {"lightning.pytorch"}  # imported on first use
    for module in SECTIONS["gyroscope.integrations"]:
        source = Path(SOURCES, *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        needed |= set(re.findall(r'\bimported\("([\w.]+)"', source))
    missing = [path for path in needed if find_spec(path.partition(".")[0]) is None]
    made = {path[:end]: _StandIn(path[:end]) for path in missing for end in (*_dots(path), len(path))}
    sys.modules |= made
    for module in SECTIONS["gyroscope.integrations"]:
        names(module)
    for path in made:
        del sys.modules[path]


def import_types() -> None:
    """Import what modules import for type checkers alone, so that types in signatures are known."""
    for path, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if path.partition(".")[0] not in ("gyroscope", "gyroscope_lab") or Path(file).name == "__init__.py":
            continue
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                for line in (one for one in node.body if isinstance(one, ast.Import | ast.ImportFrom)):
                    with suppress(ImportError):
                        exec(ast.unparse(line), vars(module))


def _dots(path: str) -> list[int]:
    return [i for i, letter in enumerate(path) if letter == "."]


def write_pages(app: Any) -> None:
    """Write the pages that changed."""
    import_adapters()
    homes()  # imports all modules
    import_types()
    for module in PAGES:
        file, text = page_file(module), page_text(module)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def _docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring before napoleon reads its sections."""
    lines[:] = restructured(lines)


def _skipped(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which the class describes."""
    return True if type(value).__name__ == "_tuplegetter" else None


def _targets(objects: dict[str, Any]) -> dict[str, str]:
    """Return which words in `code` mean which described object.

    These are full paths, paths without the package (`control.rates.profile`), and names of classes that no other
    public name has.
    """
    found: dict[str, str] = {}
    classes: dict[str, set[str]] = {}
    for page in PAGES:
        for module in (page, *sections(page)):
            for name in names(module):
                at = home(name).path
                found[name.path] = at
                if name.sort in ("class", "exception"):
                    classes.setdefault(name.name, set()).add(at)
    found |= {path: path for path in objects}
    found |= {path.partition(".")[2]: at for path, at in found.items() if path.count(".") > 1}
    found |= {name: at.pop() for name, at in classes.items() if len(at) == 1}
    return found


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    from docutils import nodes
    from sphinx.addnodes import desc_signature
    from sphinx.transforms.post_transforms import SphinxPostTransform
    from sphinx.util.nodes import make_refnode

    class Links(SphinxPostTransform):
        """Make `code` that is the name of a described object a link, on all pages."""

        default_priority = 15

        def run(self, **kwargs: Any) -> None:
            objects = self.env.domains["py"].objects
            here = self.env.docname
            for node in list(self.document.findall(nodes.literal)):
                word = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", node.astext())
                above = node.parent
                while above is not None and not isinstance(above, nodes.reference | nodes.title | desc_signature):
                    above = above.parent
                if word is None or above is not None:
                    continue
                entry = objects.get(known().get(word[1], ""))
                if word[1] in PAGES and (here == "api/index" or (entry is None and "." in word[1])):
                    place, anchor = f"api/{word[1]}", ""
                elif entry is not None:
                    place, anchor = entry.docname, entry.node_id
                else:
                    continue
                node.replace_self(make_refnode(app.builder, here, place, anchor, node.deepcopy(), word[1]))

    @cache
    def known() -> dict[str, str]:
        return _targets(app.env.domains["py"].objects)

    app.connect("builder-inited", write_pages, priority=100)
    app.connect("autodoc-process-docstring", _docstring, priority=100)
    app.connect("autodoc-skip-member", _skipped)
    app.add_post_transform(Links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
