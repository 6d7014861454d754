"""`poseidon plan` and `poseidon simulate` as a user sees them, and cluster files."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("poseidon._core")

from poseidon.cli.main import app
from poseidon.errors import InvalidArgument
from poseidon.planner.cluster import make_cluster, read_settings

SMALL = ["AlexNet", "--hosts", "4", "--link", "1gbit"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_plan_says_a_verdict_and_every_layer() -> None:
    text = run("plan", *SMALL)
    assert text.startswith("4 hosts on 1gbit: ")
    for words in ("is the limit", "fc6.weight", "sfb", "conv1.weight", "Linear scaling"):
        assert words in text


def test_plan_as_json_has_the_same() -> None:
    document = json.loads(run("plan", *SMALL, "--json"))
    assert document["verdict"] in run("plan", *SMALL)
    assert [row["hosts"] for row in document["scaling"]] == [1, 2, 4]
    assert document["scaling"][0]["speedup"] == 1
    assert {row["scheme"] for row in document["layers"]} == {"ps", "sfb"}


def test_plan_predicts_coding_as_training_would_choose_it() -> None:
    words = ["simulate", "ViT-B/16", "--hosts", "8", "--link", "1gbit", "--json"]
    usual, off, given = (
        json.loads(run(*words, *more))["step_s"] for more in ([], ["--coding", "off"], ["--coded-share", "0.5"])
    )
    assert 0.8 < usual / off < 0.95
    assert given < usual


def test_the_page_has_the_verdict_charts_and_every_layer(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    document = json.loads(run("plan", *SMALL, "--html", str(page), "--json"))
    text = unescape(page.read_text(encoding="utf-8"))
    assert document["verdict"] in text
    assert "prefers-color-scheme: dark" in text
    for row in document["layers"]:
        assert f"<td>{row['name']}</td><td>{row['scheme']}</td>" in text
    for title in ("Efficiency by number of hosts", "What would help", "One step"):
        assert text.split(f"<h2>{title}</h2>")[1].split("</section>")[0].count("<svg") == 2, title  # wide and narrow
    assert not re.search(r"(src|href)=|@import|url\(", text)  # it needs no other file
    run("plan", "AlexNet", "--hosts", "1", "--link", "1gbit", "--html", str(page))
    assert "<h2>Layers</h2>" not in page.read_text(encoding="utf-8")


def test_racks_have_the_placements_of_servers_and_the_rule_of_racks() -> None:
    racks = ["--racks", "2", "--oversubscription", "4"]
    document = json.loads(run("plan", *SMALL, *racks, "--json"))["racks"]
    least = document["least_bits_per_second"]
    workers, share = 4, 3 / 4
    assert least["NCS"] / least["NCC"] == pytest.approx(1 / workers)
    assert least["CC"] / least["NCC"] == pytest.approx(share)
    assert least["CS"] / least["NCS"] == pytest.approx(2 * share)
    assert document["least_oversubscription"] == pytest.approx(4.0)  # 1 / (1/2 · 1/2)
    assert document["by_rack_s"] < document["plain_s"]
    text = run("plan", *SMALL, *racks)
    assert "above an oversubscription of 4:1" in text
    assert "adding up by rack gives" in text
    for words in ("NCC", "a shard on every worker's host"):
        assert words in text
        assert words not in run("plan", *SMALL)
    alone = run("plan", *SMALL, "--racks", "4")
    assert "Adding up by rack cannot pay with one host a rack" in alone


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"--html .*nowhere/plan.html cannot be written: No such file"):
        run("plan", *SMALL, "--html", str(tmp_path / "nowhere" / "plan.html"))


def test_a_price_gives_samples_per_dollar(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('hosts = 4\nlink = "1gbit"\nprice = 2.5\n')
    rows = json.loads(run("plan", "AlexNet", "--cluster", str(file), "--json"))["scaling"]
    for row in rows:
        assert row["samples_per_dollar"] == pytest.approx(row["samples_per_s"] * 3600 / (2.5 * row["hosts"]))
    text = run("plan", "AlexNet", "--cluster", str(file))
    ratio = rows[0]["samples_per_dollar"] / rows[-1]["samples_per_dollar"]
    assert f"A sample costs {ratio:.2f} times what it costs on one host." in text
    assert "samples/$" in text
    assert "samples/$" not in run("plan", *SMALL)
    file.write_text('hosts = 4\nlink = "1gbit"\nprice = -1\n')
    with pytest.raises(InvalidArgument, match=r"cluster.toml, line 3: price is -1: it must be 0"):
        make_cluster(read_settings(file))


def test_simulate_by_message_and_by_class() -> None:
    few = json.loads(run("simulate", *SMALL, "--json"))
    many = json.loads(run("simulate", "AlexNet", "--hosts", "10000", "--link", "10gbit", "--json"))
    assert (few["by"], many["by"]) == ("message", "class")
    assert few["step_s"] > few["compute_s"]
    assert many["cluster"]["hosts"] == 10_000
    assert "message by message" in run("simulate", *SMALL)


def test_a_cluster_file_and_an_option_that_beats_it(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('hosts = 4\nlink = "1gbit"\nlatency_ms = 0.2\n')
    with_file = json.loads(run("simulate", "AlexNet", "--cluster", str(file), "--json"))
    assert with_file["cluster"]["bits_per_second"] == 1e9
    assert with_file["cluster"]["latency_s"] == 2e-4
    faster = json.loads(run("simulate", "AlexNet", "--cluster", str(file), "--link", "10gbit", "--json"))
    assert faster["step_s"] < with_file["step_s"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('hosts = 4\nlink = "fast"\n', 2, "the link rate is 'fast'"),
        ('hosts = 4\nlink = "-1gbit"\n', 2, "the link rate is '-1gbit'"),
        ('link = "1gbit"\n\nhosts = 0\n', 3, "hosts is 0: it must be 1 or more"),
        ('hosts = 4\nlink = "1gbit"\nracks = 3\n', 3, "4 hosts cannot be spread evenly over 3 racks"),
        ('hosts = 4\nlink = "1gbit"\nslowest = 0.5\n', 3, "slowest is 0.5: it must be 1"),
        ('hosts = 1\nlink = "1gbit"\nslowest = 2\n', 3, "slowest is set, but there is one worker"),
        ('hosts = 4\nlink = "1gbit"\noversubscription = 4\n', 3, "one rack has no uplink"),
        ('hosts = "4"\nlink = "1gbit"\n', 1, "it must be a whole number"),
        ('hosts = true\nlink = "1gbit"\n', 1, "it must be a whole number"),
        ('hosts = 4\nlink = "1gbit"\n[switch]\nports = 8\n', 3, "'switch' is no setting of a cluster"),
        ('hosts = 4\nlink = "1gbit"\nworkers_per_host = 2\nservers = 2\n', 4, "2 servers and 2 workers per host"),
        ("hosts = 4\nhosts = 5\n", 2, "cannot be read"),
    ],
)
def test_a_fault_of_a_file_is_told_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as raised:
        make_cluster(read_settings(file))
    message = str(raised.value)
    assert f"line {line}" in message
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["VGG17", "--hosts", "4", "--link", "1gbit"], "unknown model 'VGG17'"),
        (["AlexNet", "--hosts", "4"], "link is missing: give --link"),
        (["AlexNet", "--hosts", "-4", "--link", "1gbit"], "--hosts: hosts is -4"),
        (["AlexNet", "--hosts", "20000", "--link", "1gbit"], "give 10000 at most"),
        (["AlexNet", "--hosts", "4", "--link", "1gbit", "--compute", "-1"], "--compute is -1"),
        (["AlexNet", "--hosts", "4", "--link", "1gbit", "--wire", "fp8"], "wire"),
        (["AlexNet", "--hosts", "4", "--link", "1gbit", "--scheme", "magic"], "--scheme is 'magic'"),
        (["AlexNet", "--cluster", "nowhere.toml"], "cannot be read"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        run("plan", *arguments)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
