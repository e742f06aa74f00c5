"""scripts/report.py on files that the logger wrote: the numbers of the page, odd files, and what is escaped."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from common.logger import Logger
from common.models import char_tokenizer
from tests.test_show_tokens import ANSWER, PROMPT, oracle, run  # noqa: F401

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))  # as for a script that is run
spec = importlib.util.spec_from_file_location("report", ROOT / "scripts" / "report.py")
report = importlib.util.module_from_spec(spec)
sys.modules["report"] = report
spec.loader.exec_module(report)

HOSTILE = "</pre></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{data}}"
TIMES = {"time/step": 2.0, "time/train": 1.0, "time/trainer_wait": 0.5, "time/refit": 0.25, "time/eval": 0.5}


def write_run(folder, rows, flags=None, samples=(), finished=True):
    """A run's folder as the programs write it."""
    flags = {"seed": 1, "lr": 0.1, "max_steps": len(rows), "log": {"output_dir": str(folder)}} | (flags or {})
    with Logger(folder, flags, max(len(rows), 1), ("reward/mean",)) as log:
        log.log_samples(0, list(samples))
        for step, row in enumerate(rows):
            log.log_step({"step": step} | row)
        if finished:
            (Path(folder) / "summary.json").write_text("{}\n")
    return Path(folder)


def page_of(*folders, out=None):
    out = out or folders[0] / "report.html"
    report.main(report.Args(runs=tuple(folders), out=out))
    return out.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.inside = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        self.text += data if self.inside not in ("script", "style") else ""


def charts_of(text) -> dict:
    """{title: [points of each line]}: what the page's script draws."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    return {chart["title"]: [line["points"] for line in chart["lines"]] for chart in data}


def test_a_line_is_the_mean_of_the_seeds_and_its_band_their_range(tmp_path):
    seeds = [
        write_run(tmp_path / f"s{n}", [{"reward/mean": r, **TIMES} for r in rewards], {"seed": n})
        for n, rewards in enumerate([[0.0, 0.5, 1.0], [0.25, 0.25, 0.25], [0.5, 0.75]])
    ]
    control = write_run(tmp_path / "control", [{"reward/mean": 0.125, **TIMES}] * 3, {"lr": 0.0})
    text = page_of(*seeds, control)
    # max_steps of the third differs as well (2 steps): a setting of its own
    lines = charts_of(text)["Reward"]
    assert lines[0] == [[0, 0.125, 0, 0.25], [1, 0.375, 0.25, 0.5], [2, 0.625, 0.25, 1]]
    assert lines[1] == [[0, 0.5, 0.5, 0.5], [1, 0.75, 0.75, 0.75]]
    assert lines[2] == [[step, 0.125, 0.125, 0.125] for step in range(3)]
    told = Page(text).text
    assert "run, lr 0.1, max_steps 3 (2 runs)" in told and "run, lr 0, max_steps 3" in told


def test_scores_stand_at_their_policy_version(tmp_path):
    rows = [{"eval/toy/mean": 0.25}, {}, {"eval/toy/mean": 0.75, "eval_end/toy/mean": 0.5}]
    text = page_of(write_run(tmp_path / "a", [row | TIMES for row in rows]))
    assert charts_of(text)["Evaluation"] == [[[0, *[0.25] * 3], [2, *[0.75] * 3], [3, *[0.5] * 3]]]
    assert "0.250, 0.750 (version 2), 0.500" in Page(text).text


def test_a_long_run_is_drawn_in_few_points_and_keeps_its_peaks(tmp_path):
    rewards = np.random.default_rng(0).random(6000).round(3).tolist()
    rows = [{"reward/mean": r, "mismatch/abs_max": 1.0, "mismatch/abs_mean": 0.5} for r in rewards]
    rows[3210]["mismatch/abs_max"] = 9.0
    folder = write_run(tmp_path / "a", [])
    lines = [json.dumps({"step": step} | row | TIMES) + "\n" for step, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    text = page_of(folder)
    charts = charts_of(text)
    (points,) = charts["Reward"]
    assert len(points) == 150 and len(text) < 400_000
    assert [p[0] for p in points[:2]] == [19.5, 59.5]
    wanted = [sum(rewards[at : at + 40]) / 40 for at in range(0, 6000, 40)]
    assert [p[1] for p in points] == pytest.approx(wanted, rel=1e-4)
    peaks = [p[1] for p in charts["Engine against trainer"][1]]
    assert peaks == [1.0] * 80 + [9.0] + [1.0] * 69


def test_what_is_not_finite_is_a_gap_and_is_said(tmp_path):
    rows = [{"reward/mean": r, "grad_norm": float("nan")} | TIMES for r in (0.5, float("inf"), 1.0)]
    folder = write_run(tmp_path / "a", rows)
    with open(folder / "metrics.jsonl", "a") as file:  # as another writer might have left it, then killed
        file.write('{"step": 3, "reward/mean": NaN, "time/step": 2.0}\n{"step": 4, "reward/me')
    (folder / "summary.json").unlink()
    text = page_of(folder)
    gap = [None] * 3
    assert charts_of(text)["Reward"] == [[[0, *[0.5] * 3], [1, *gap], [2, *[1.0] * 3], [3, *gap]]]
    assert "Gradient" not in charts_of(text), "there is no value to draw"
    told = Page(text).text
    assert "5 values were not finite" in told and "line 5 is broken" in told and "it did not finish" in told


@pytest.mark.parametrize(
    "rows, steps", [([], "0 of 0"), ([{}], "1 of 1"), ([{"reward/mean": 1.0}], "1 of 1")]
)
def test_short_and_empty_runs_have_a_page(tmp_path, rows, steps):
    text = page_of(write_run(tmp_path / "a", rows))
    assert steps in Page(text).text and "No step has its time" in Page(text).text
    assert charts_of(text) == ({"Reward": [[[0, 1.0, 1.0, 1.0]]]} if rows and rows[0] else {})


def test_a_run_without_flags_and_samples_has_a_page(tmp_path):
    folder = write_run(tmp_path / "a", [{"reward/mean": 1.0} | TIMES])
    (folder / "config.json").unlink()
    (folder / "samples.jsonl").unlink()
    assert "config.json is missing" in Page(page_of(folder)).text


def test_a_folder_that_is_no_run_is_named(tmp_path):
    command = [sys.executable, "scripts/report.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr == (
        f"error: {tmp_path}: has no metrics.jsonl; name the --output-dir of a run\n"
    )


def test_the_bars_say_who_waited(tmp_path):
    hist = {"staleness/hist": [1, 2, 1], "rollout/dropped/timeout": 2, "time/rollout_wait": 1.0}
    told = Page(page_of(write_run(tmp_path / "a", [TIMES | hist, TIMES | hist | {"time/eval": 1.5}]))).text
    # a step of 2 s: 1 train, 0.5 wait, 0.25 refit, 0.25 unnamed; engines: 2 of 2 x 2 + 0.5 + 1.5 s
    for part in ("train 50%", "wait for rollouts 25%", "refit 12%", "other 0.25 s a step", "have none 33%"):
        assert part in told
    assert "lag 0 25.0%" in told and "lag 1 50.0%" in told and "timeout 4" in told


def test_flags_that_differ_are_shown(tmp_path):
    rows = [{"reward/mean": 1.0} | TIMES]
    a = write_run(tmp_path / "a", rows, {"engine": {"kv_cache_gb": 8.0, "num_engines": 1}})
    b = write_run(tmp_path / "b", rows, {"engine": {"kv_cache_gb": 4.0, "num_engines": 1}, "extra": None})
    text = page_of(a, b)
    differing = text[text.index("<h2>Flags</h2>") : text.index("all flags")]
    assert "<tr><td>kv_cache_gb</td><td>8</td><td>4</td></tr>" in differing
    assert "num_engines" not in differing and "<td>output_dir</td>" in differing
    assert "No package differs" in text and "kv_cache_gb 4" in Page(text).text


def test_what_a_model_wrote_is_text(tmp_path):
    sample = {"ticket": 0, "rollout_id": HOSTILE, "reward": 1.0, "invalid": HOSTILE, "prompt": HOSTILE}
    sample |= {"transcript": HOSTILE, "advantage": -1.0, "versions": [0, 0], "num_actions": 3}
    name = "a<img src=x onerror=1>"
    rows = [{"reward/mean": 1.0, f"rollout/dropped/{HOSTILE}": 1, f"eval/{HOSTILE}/mean": 0.5} | TIMES]
    folder = write_run(tmp_path / name, rows, {"env": HOSTILE}, [sample])
    text = page_of(folder)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2 and "img" not in [tag for tag, _ in page.tags]
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert page.text.count(HOSTILE) >= 6 and f"eval/{HOSTILE}/mean" in page.text
    addresses = [a[key] for _, a in page.tags for key in ("src", "href") if key in a]
    assert addresses == ["data:,"] and "http://" not in re.sub(r"http://www.w3.org/\d+/\w+", "", text)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_it_and_runs_nothing_else(tmp_path):
    sample = {"rollout_id": "0.0", "reward": 1.0, "prompt": HOSTILE, "transcript": HOSTILE, "advantage": 1.0}
    rows = [{"reward/mean": 0.5, f"eval/{HOSTILE}/mean": 0.5, "grad_norm": 1.0} | TIMES] * 3
    folder = write_run(tmp_path / "a", rows, samples=[sample])
    page_of(folder)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{folder}/report.html"], capture_output=True, text=True, timeout=180
    )
    page = Page(done.stdout)
    titles = [f'aria-label="{title}"' for title in ("Reward", "Evaluation", "Gradient", "Waiting")]
    assert all(title in done.stdout for title in titles), done.stderr
    assert "<title>a</title>" in done.stdout and "img" not in [tag for tag, _ in page.tags]
    assert ":CONSOLE" not in done.stderr


def test_any_character_is_written_and_the_same_runs_give_the_same_page(tmp_path):
    odd = "\U0001f600 \u202e \x00 \x1b[31m \u2028 " + "é" * 9000
    folder = write_run(tmp_path / "a", [{"reward/mean": 1.0} | TIMES], samples=[{"transcript": odd}])
    with open(folder / "samples.jsonl", "a") as file:
        file.write('{"step": 0, "transcript": "half of a pair \\ud83d"}\n')
    text = page_of(folder)
    assert "\U0001f600" in text and "half of a pair ?" in text and "é" * 5000 in text
    assert f"{len(odd) - 6000:,} more characters" in text
    assert page_of(folder, out=tmp_path / "again.html") == text


def test_recorded_tokens_have_their_colours(run, tmp_path):
    out = tmp_path / "tokens.html"
    report.main(report.Args(runs=(run,), out=out, mismatch=True))
    shown = [a for tag, a in Page(out.read_text()).tags if tag == "span" and a.get("title")]
    told = [dict(line.split(": ", 1) for line in a["title"].splitlines() if ": " in line) for a in shown]
    # two rollouts of step 5, the lower reward first: late tokens are masked and have no advantage
    assert [t["version"] for t in told] == list("334455") + ["5", "5"]
    assert [a["class"] for a in shown] == ["t out"] * 2 + ["t neg"] * 4 + ["t"] * 2
    trainer = oracle(run, 5, char_tokenizer().encode(PROMPT + ANSWER), 6)
    difference = np.abs(trainer + np.arange(1.0, 7.0)).clip(max=1)
    styles = [dict(part.split(":") for part in a["style"].split(";")) for a in shown]
    assert [float(style["--m"]) for style in styles[:6]] == pytest.approx(difference.tolist(), abs=6e-3)
    assert [style.get("--a") for style in styles] == [None] * 2 + ["0.71"] * 6
    assert [style.get("--l") for style in styles] == ["0.25"] * 2 + ["0.12"] * 2 + [None] * 4
    report.main(report.Args(runs=(run,), out=out))
    assert "--m:" not in out.read_text() and out.read_text().count('class="t neg"') == 4
