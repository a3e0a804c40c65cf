"""A run in a notebook: one output that is drawn again, with a bar and the reward; lines elsewhere."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from r3async.tools.tail import notebook
from r3async.tools.tail.live import LiveView
from tests.tools.test_live import ROW, status


@pytest.fixture
def shown(monkeypatch):
    """What a notebook shows, in order; IPython is not installed with r3async."""
    shown: list[str] = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    display.HTML = str
    display.display = lambda text, display_id: (shown.append(text), SimpleNamespace(update=shown.append))[1]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook, "DRAW_SECONDS", 0.0)
    return shown


def test_steps_are_drawn_in_place_with_a_bar_and_the_reward(shown, capsys):
    with notebook.make_view(10) as view:
        view.show_status(status("loading <engine>"))
        for step in range(1, 5):
            view.show_status(status(row={**ROW, "step": step, "reward/mean": step / 4}))
        view.print_line("a line that stays")
    assert "loading &lt;engine&gt;" in shown[1]
    assert "<polyline" not in shown[2], "one step is no curve"
    assert "value='4' max='10'" in shown[-1]
    assert "reward 1.000  drift" in shown[-1]
    points = re.search("points='([^']*)'", shown[-1])[1].split()
    assert points == ["56.0,120.0", "112.0,80.0", "168.0,40.0", "224.0,0.0"]
    assert capsys.readouterr().err == "a line that stays\n"
    view.rewind_to_step(2)
    view.show_status(status(row={**ROW, "step": 3, "reward/mean": 0.5}))
    assert len(re.search("points='([^']*)'", shown[-1])[1].split()) == 3, "a step that is made again counts once"


def test_a_long_run_has_a_point_for_each_pixel(shown):
    text = notebook.draw_reward(dict.fromkeys(range(1, 5001), 0.5), 5000)
    points = re.search("points='([^']*)'", text)[1].split()
    assert len(points) <= notebook.WIDTH + 1
    assert points[-1] == "560.0,0.0"


def test_outside_of_a_notebook_there_are_lines(shown, monkeypatch):
    assert isinstance(notebook.make_view(3), notebook.NotebookView)
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    assert type(notebook.make_view(3)) is LiveView, "IPython on a terminal"
    monkeypatch.delitem(sys.modules, "IPython")
    assert type(notebook.make_view(3)) is LiveView
