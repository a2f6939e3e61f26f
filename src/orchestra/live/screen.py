# SPDX-License-Identifier: Apache-2.0
"""The screen of `orchestra top`, redrawn as the run goes on; needs Textual."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from orchestra.live import text as words
from orchestra.live.moment import NodeNow, RunNow

Look = Callable[[], RunNow | None]
EVERY = 0.5  # seconds
_WIDE = 104  # columns that all figures need
_COLOURS = {
    "running": "green", "serving": "green", "waiting": "yellow", "scoring": "cyan", "setting up": "cyan", "done": "dim",
    "stopped": "yellow", "failed": "red", "died": "red", "silent": "red",
}  # fmt: skip
_HELP = """\
s        sort by the next figure: node, step, wait, rate, loss
w enter  details of the chosen node (up, down); Esc goes back
l        small curves: step times or losses
p        pause the screen; the run goes on
q        quit; the run goes on

comp.  comm.  wait: shares of the time of the last 32 steps. age: how many updates a gradient had missed, a mean
over the last 32, known to servers. last event: when the node last wrote an event, in real seconds."""


def _colour(state: str) -> str:
    return next((colour for name, colour in _COLOURS.items() if state.startswith(name)), "")


class _Pane(ModalScreen[None]):
    """A text shown on top of the screen."""

    CSS = """
    _Pane { align: center middle; }
    _Pane VerticalScroll { width: 90%; max-width: 110; height: auto; max-height: 90%; border: round $accent; padding: 0 1; background: $surface; }
    """  # noqa: E501
    BINDINGS: ClassVar[list[BindingType]] = [Binding(key, "dismiss", "Back") for key in ("escape", "q", "enter")]

    def __init__(self, content: Callable[[int], Text]) -> None:
        super().__init__()
        self._content = content

    def compose(self) -> ComposeResult:
        """Yield the widget of the text."""
        with VerticalScroll():
            yield Static(id="pane")

    def on_mount(self) -> None:
        """Refresh the text as often as the screen."""
        self.refresh_content()
        self.set_interval(EVERY, self.refresh_content)

    def refresh_content(self) -> None:
        """Show the present text."""
        self.query_one("#pane", Static).update(self._content(max(40, min(104, int(self.size.width * 0.9) - 6))))


class Top(App[None]):
    """The screen of one run."""

    TITLE = "orchestra top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head, #topology { height: auto; padding: 0 1; }
    #topology { color: $text-muted; }
    #nodes { height: 1fr; }
    #news { height: 5; padding: 0 1; border-top: solid $panel; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("w", "details", "Worker"),
        Binding("l", "curves", "Loss/time"),
        Binding("p", "pause", "Pause"),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look
        self.now: RunNow | None = None
        self.sort = "node"
        self.curves = "times"
        self.paused = False
        self._shown: list[str] = []  # columns and nodes, in order

    def compose(self) -> ComposeResult:
        """Yield the widgets from top to bottom."""
        yield Static(id="head")
        yield Static(id="topology")
        yield DataTable(id="nodes", cursor_type="row", zebra_stripes=True)
        yield Static(id="news")
        yield Footer()

    def on_mount(self) -> None:
        """Start looking."""
        self.theme = "textual-dark"
        self.step()
        self.set_interval(EVERY, self.step)

    def on_resize(self) -> None:
        """Redraw for the new size."""
        self.draw()

    def step(self) -> None:
        """Look again and redraw, unless paused."""
        if not self.paused:
            self.now = self._look()
            self.draw()

    # Drawing.

    def draw(self) -> None:
        """Redraw all widgets."""
        below, run, width = self.screen_stack[0], self.now, self.size.width
        if not below.query("#news"):  # the first resize may come before the widgets
            return
        if run is None:
            below.query_one("#head", Static).update("waiting for the run to begin …")
            return
        below.query_one("#head", Static).update(self._head(run, width - 2))
        wiring = words.topology(run, width - 2) if self.size.height >= 20 else []
        below.query_one("#topology", Static).update(Text("\n".join(wiring), no_wrap=True))
        self._table(below.query_one("#nodes", DataTable), run, width)
        below.query_one("#news", Static).update(self._news(run))

    def _head(self, run: RunNow, width: int) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(words.title(run), "bold").append(f"   {run.name}", "dim")
        text.append("   paused" * self.paused, "reverse")
        if run.fraction is not None:
            room = max(10, min(60, width - 10))
            text.append("\n").append(words.bar(run.fraction, room), "cyan on grey19").append(f" {run.fraction:4.0%}")
        state, _, rest = words.situation(run).partition(" · ")
        text.append("\n").append(state, f"bold {_colour(state)}").append(f" · {rest}")
        if run.why:
            text.append("\n").append(run.why, "yellow" if run.state in ("done", "stopped") else "red")
        return text

    def _news(self, run: RunNow) -> Text:
        lines = [f"{t:9.1f} s  {subject:<10} {what}" for t, subject, what in run.news[-4:]]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def _table(self, table: DataTable[Text], run: RunNow, width: int) -> None:
        nodes = words.in_order(run.nodes, self.sort)
        rows = {str(node.node): self._row(node, width) for node in nodes}
        columns = list(next(iter(rows.values()), {}))
        if self._shown == [*columns, *rows]:
            for key, row in rows.items():
                for name, cell in row.items():
                    table.update_cell(key, name, cell)
            return
        chosen = self.chosen
        table.clear(columns=True)
        for name in columns:
            table.add_column(self._label(name), key=name)
        for key, row in rows.items():
            table.add_row(*row.values(), key=key)
        self._shown = [*columns, *rows]
        if chosen is not None and str(chosen.node) in rows:
            table.move_cursor(row=[*rows].index(str(chosen.node)))

    def _label(self, name: str) -> Text:
        mark = {"rate": "samples/s"}.get(self.sort, self.sort)
        return Text(f"{name} ▾" if name == mark else name, justify="left" if name in ("node", "state") else "right")

    def _row(self, node: NodeNow, width: int) -> dict[str, Text]:
        found = words.cells(node)
        wide = width >= _WIDE
        row = {name: Text(found[name], justify="right") for name in ("node", "step", "loss", "age")}
        row["node"] = Text(found["node"])
        if wide:
            row |= {name: Text(found[name], justify="right") for name in ("comp.", "comm.")}
        room = 10 if wide else 5
        row["wait"] = Text(words.bar(node.wait, room), "red").append(f" {found['wait']:>4}", "default")
        if wide:
            row |= {name: Text(found[name], justify="right") for name in ("samples/s", "traffic/s")}
        name = "step times" if self.curves == "times" else "losses"
        row[name] = Text(words.spark(getattr(node, self.curves), 22 if width >= 120 else 12), "cyan")
        row["state"] = Text(found["state"], _colour(node.state))
        return row

    # Keys.

    @property
    def chosen(self) -> NodeNow | None:
        """The node under the cursor."""
        table = self.screen_stack[0].query_one("#nodes", DataTable)
        if self.now is None or not table.row_count or not table.is_valid_row_index(table.cursor_row):
            return None
        key = table.coordinate_to_cell_key((table.cursor_row, 0)).row_key.value  # type: ignore[arg-type]
        return next((node for node in self.now.nodes if str(node.node) == key), None)

    def action_sort(self) -> None:
        """Sort by the next figure."""
        self.sort = words.SORTS[(words.SORTS.index(self.sort) + 1) % len(words.SORTS)]
        self._shown = []
        self.draw()

    def action_curves(self) -> None:
        """Switch between curves of step times and of losses."""
        self.curves = "losses" if self.curves == "times" else "times"
        self.draw()

    def action_pause(self) -> None:
        """Pause, or go on."""
        self.paused = not self.paused
        self.draw()

    def action_help(self) -> None:
        """Show what the keys do."""
        self.push_screen(_Pane(lambda width: Text(_HELP)))

    def action_details(self) -> None:
        """Show the details of the chosen node."""
        if (node := self.chosen) is not None:
            self.push_screen(_Pane(lambda width: self._details(node.node, width)))

    def on_data_table_row_selected(self) -> None:
        """Show the details of the node on which Enter was pressed."""
        self.action_details()

    def _details(self, number: int, width: int) -> Text:
        node = next((n for n in self.now.nodes if n.node == number), None) if self.now is not None else None
        if node is None or self.now is None:
            return Text("This node is no longer there.")
        text = Text(overflow="fold").append(node.name, "bold").append(f"   {node.state}\n\n", _colour(node.state))
        for name, value in words.cells(node).items():
            if name not in ("node", "state"):
                text.append(f"{name:>10}  {value}\n")
        text.append(f"{'samples':>10}  {node.samples:,}\n")
        for name, values in (("step times", node.times), ("losses", node.losses)):
            if values:
                text.append(f"\n{name}, the last {len(values)}: {min(values):.4g} to {max(values):.4g}\n", "dim")
                text.append(words.spark(values, width).lstrip() + "\n", "cyan")
        own = [(t, what) for t, subject, what in self.now.news if subject == node.name]
        text.append("\n" + "\n".join(f"{t:9.1f} s  {what}" for t, what in own[-6:]), "dim")
        return text
