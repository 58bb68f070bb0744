"""R-FILE, one line: every kind of fault with its byte, and no answer that another strict reader would not give."""

import collections
import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from production.files import parse
from production.files.faults import FIXES, LineError
from production.files.parse import parse_row
from production.files.strict import MAX_DEPTH, StrictJson

M = b'{"role": "user", "content": "a"}'
U = '{"messages": [{"role": "user", "content": "é'.encode()

# line, kind, byte within the line
FAULTS = [
    (b"", "blank_line", 0),
    (b" \t \r", "blank_line", 0),
    (b"\xef\xbb\xbf" + b'{"messages": [' + M + b"]}", "bom", 0),
    ('{"messages"'.encode("utf-16"), "bom", 0),
    ("\ufeff{".encode("utf-16-be"), "bom", 0),
    (b'{"messages": [\x00]}', "nul_byte", 14),
    (b'{"messages": [{"role": "user", "content": "\x00"}]}', "nul_byte", 43),
    (b'{"messages": [{"role": "user", "content": "\x00\xff"}]}', "nul_byte", 43),
    (b'{"messages": [{"role": "user", "content": "\xff\x00"}]}', "nul_byte", 44),
    (b'{"messages": [{"role": "user", "content": "\xe9"}]}', "invalid_utf8", 43),
    (b'{"messages": [{"role": "user", "content": "a\xc0\x80"}]}', "invalid_utf8", 44),
    (b'{"messages": [{"role": "user", "content": "a\xed\xa0\x80"}]}', "invalid_utf8", 44),
    (b'{"messages": [{"role": "user", "content": "a\xf5\x80\x80\x80"}]}', "invalid_utf8", 44),
    (b'{"\xe9": 1, "messages": [' + M + b"]}", "invalid_utf8", 2),
    (b"{'messages': []}", "invalid_json", 1),
    (b'{"messages": [' + M + b",]}", "invalid_json", 47),
    (b'{"messages": [' + M + b"]} {}", "invalid_json", 49),
    (b'{"messages": [' + M + b"]", "invalid_json", 47),
    (b'{"messages" [' + M + b"]}", "invalid_json", 12),
    (b'{"messages": [' + M + b" " + M + b"]}", "invalid_json", 47),
    (b'{"messages": [' + M + b'], "x": NaN}', "invalid_json", 54),
    (b'{"messages": [' + M + b'], "x": -Infinity}', "invalid_json", 54),
    (b'{"messages": [' + M + b'], "x": 01}', "invalid_json", 55),
    (b'{"messages": [' + M + b'], "x": +1}', "invalid_json", 54),
    (b'{"messages": [' + M + b'], "x": 1.}', "invalid_json", 55),
    (b'{"messages": [{"role": "user", "content": "a\tb"}]}', "invalid_json", 44),
    (b'{"messages": [{"role": "user", "content": "a\\x41"}]}', "invalid_json", 44),
    (U + b'\\u12"}]}', "invalid_json", len(U)),
    (b"\x1f\x8b\x08\x00", "nul_byte", 3),
    (b'{"messages": [' + M + b'], "x": 1e999}', "number_out_of_range", 54),
    (b'{"messages": [' + M + b'], "x": ' + b"9" * 4301 + b"}", "number_out_of_range", 54),
    (b'{"messages": [' + M + b'], "x": ' + b"[" * 128 + b"]" * 128 + b"}", "nested_too_deep", 54 + 127),
    (b'{"messages": [' + M + b'], "x": ' + b"[" * 500_000 + b"}", "nested_too_deep", 54 + 127),
    (b'{"messages": [{"role": "u", "role": "v", "content": ""}]}', "duplicate_key", 28),
    (b'{"messages": [{"role": "u", "r\\u006fle": "v", "content": ""}]}', "duplicate_key", 28),
    (b'{"messages": [{"role": "u", "content": ":", "content": ""}]}', "duplicate_key", 44),
    (b'{"messages": [{"role": "u", "content": "", "content" : ""}]}', "duplicate_key", 43),
    (b'{"messages": [{"role": "u", "content": "", "content"  : ""}]}', "duplicate_key", 43),
    (b'{"messages": [{"role": "u", "content": "", "content"\t: ""}]}', "duplicate_key", 43),
    (b'{"messages": [{"role": "u", "content": "", "content"\r: ""}]}', "duplicate_key", 43),
    (b'{"messages": [{"role": "u", "content": "", "a\\\\": 1, "a\\\\": 2}]}', "duplicate_key", 53),
    (b'{"messages": [{"role": "u", "content": "\\":\\":", "a": 1, "a": 2}]}', "duplicate_key", 57),
    (b'{"messages": [{"role": "u", "content": "", "calls": [{"a": {"b": 1, "b": 1}}]}]}', "duplicate_key", 68),
    (b'{"messages": [' + M + b'], "messages": []}', "duplicate_key", 49),
    ('{"messages": [{"role": "é", "content": "é", "role": ""}]}'.encode(), "duplicate_key", 46),
    (b'{"messages": [{"role": "u", "content": "ab\\ud800"}]}', "lone_surrogate", 42),
    (b'{"messages": [{"role": "u", "content": "ab\\udc00"}]}', "lone_surrogate", 42),
    (b'{"messages": [{"role": "u", "content": "\\ud83d\\ude00\\uD83Dx"}]}', "lone_surrogate", 52),
    (b'{"messages": [{"role": "u", "content": "\\\\ud83d\\ud83d\\n\\ude00"}]}', "lone_surrogate", 47),
    (b'{"messages": [{"role": "u", "content": "\\ud83d\\u0041"}]}', "lone_surrogate", 40),
    (b'{"\\udfff": 1, "messages": [' + M + b"]}", "lone_surrogate", 2),
    (b" [1]", "row_not_object", 1),
    (b'"messages"', "row_not_object", 0),
    (b"null", "row_not_object", 0),
    (b' {"conversations": []}', "missing_chat_key", 1),
    (b'{"messages": {"a": 1}}', "row_not_list", 13),
    (b'{"messages": null}', "row_not_list", 13),
    (b'{"messages": []}', "empty_row", 13),
    (b'{"messages": [' + M + b', "b"]}', "message_not_object", 48),
    (b'{"messages": [' + M + b", [" + M + b"]]}", "message_not_object", 48),
    (b'{"messages": [' + M + b', {"content": "b"}]}', "missing_role", 48),
    (b'{"messages": [' + M + b', {"Role": "u", "content": "b"}]}', "missing_role", 48),
    (b'{"messages": [' + M + b', {"role": null, "content": "b"}]}', "role_not_text", 57),
    (b'{"messages": [' + M + b', {"role": "user"}]}', "missing_content", 48),
    (b'{"messages": [' + M + b', {"role": "user", "content":null}]}', "content_null", 75),
    (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "content_parts", 42),
    ('{"é": 1, "messages": [{"role": "user", "content": 3}]}'.encode(), "content_not_text", 51),
    (b'{"messages": [{"role": "user", "content": {"a": 1}}]}', "content_not_text", 42),
    (b'{"messages": [{"role": "user", "content": true}]}', "content_not_text", 42),
]
KINDS_OF_FILES = {
    *("no_files", "missing_file", "not_a_file", "unreadable_file", "empty_file", "no_rows_left", "file_changed"),
    *("truncated_compressed", "corrupt_compressed", "no_space", "no_cache_folder", "line_too_long"),
    *("other_format", "json_array", "indented_json"),
}


@pytest.fixture(params=[0, 1 << 12], ids=["arrays", "bytes"])
def both_counts(monkeypatch, request):
    monkeypatch.setattr(parse, "_SHORT", request.param)


@pytest.mark.usefixtures("both_counts")
@pytest.mark.parametrize(("line", "kind", "byte"), FAULTS, ids=[f"{kind}-{i}" for i, (_, kind, _) in enumerate(FAULTS)])
def test_r_file_6_and_7_each_fault_is_named_with_its_byte(line, kind, byte):
    with pytest.raises(LineError) as caught:
        parse_row(line, chat_key="messages")
    assert (caught.value.kind, caught.value.offset) == (kind, byte)


def test_the_table_knows_every_kind_of_a_line():
    assert {kind for _, kind, _ in FAULTS} | {"truncated_last_line"} | KINDS_OF_FILES == set(FIXES)


WHOLE = r'{"messages": [{"role": "ué", "content": "a\n\u00e9\ud83d\ude00", "n": [-1.5e+3, true, null]}]}'.encode()


def test_r_file_2_a_last_line_cut_anywhere_is_truncated():
    for end in range(1, len(WHOLE)):
        with pytest.raises(LineError) as caught:
            parse_row(WHOLE[:end], chat_key="messages", unterminated=True)
        assert (caught.value.kind, caught.value.offset) == ("truncated_last_line", end)


def test_r_file_2_a_whole_last_line_needs_no_newline_and_other_faults_keep_their_names():
    assert parse_row(WHOLE, chat_key="messages", unterminated=True)[0]["role"] == "ué"
    for line, kind in [
        (b'{"messages": nope}', "invalid_json"),
        (b'{"messages": [], "messages": []', "duplicate_key"),
        (b'{"messages": [\x00\x00\x00', "nul_byte"),
        (b'{"messages": [\x00\xc3', "nul_byte"),
        (b'{"a": 1}', "missing_chat_key"),
    ]:
        with pytest.raises(LineError) as caught:
            parse_row(line, chat_key="messages", unterminated=True)
        assert caught.value.kind == kind


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [{"role": "u", "content": "\u2028\x85\u00a0\\u0000", "tool_calls": [{"a": {"b": [1, 2.5, null]}}]}], "id": 7}',
        '{"messages":[{"role":"u","content":":\\":\\\\\\":\\"  : \\" :"}]}',
        '{"messages" : [{"role"  : "u", "content"\t:\t"" , "a\\\\" :1}]}\r',
        '{"messages": [{"role": "u", "content": ":", "a"' + " " * 100 + ': ":"}]}',
        '{"": {"": {}}, "messages": [{"role": "", "content": "", "": [[], {}], "n": 18446744073709551616}]}',
        '{"messages": [{"role": "u", "content": "a"}], "x": ' + "[" * 127 + "]" * 127 + "}",
        '{"messages": [{"role": "u", "content": "a"}], "x": ' + "9" * 4300 + "}",
        '{"messages": [{"role": "u", "content": "a"}], "x": [-0, -0.0, 5e-324, 1e-999, 1.7976931348623157e308]}',
    ],
)
def test_r_file_7_odd_rows_that_are_whole_are_read_as_json_reads_them(text):
    expected = json.loads(text)["messages"]
    assert repr(parse_row(text.encode(), chat_key="messages")) == repr(expected)
    assert repr(StrictJson(text).value["messages"]) == repr(expected)


@pytest.mark.usefixtures("both_counts")
def test_plain_rows_do_not_pay_for_the_strict_parser(monkeypatch):
    monkeypatch.setattr(parse, "StrictJson", None)
    text = json.dumps(
        {
            "messages": [
                {"role": "user", "content": 'say "x": 1, {"k":"v"} mot : fin \\" \\\\":'},
                {"role": "user", "content": ": \\"},
            ],
            "tools": [{"a": {"b": 1}}],
        }
    )
    assert parse_row(text.encode(), chat_key="messages")[0]["role"] == "user"


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_r_file_7_both_parsers_count_depth_alike(opening, closing):
    for levels, fits in ((MAX_DEPTH - 3, True), (MAX_DEPTH - 2, False)):
        deep = opening * levels + "1" + closing * levels
        line = '{"messages": [{"role": "u", "content": "", "d": ' + deep + "}]}"
        if fits:
            assert parse_row(line.encode(), chat_key="messages") == StrictJson(line).value["messages"]
        else:
            for read in (lambda line: parse_row(line.encode(), chat_key="messages"), StrictJson):
                with pytest.raises(LineError, match="nested"):
                    read(line)


# A second strict reader, on other code: what it takes must be read the same, what it refuses must be refused.

texts = st.one_of(
    st.text(st.sampled_from('":\\ \t{},ué\u2028😀'), max_size=6),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = (
    scalars
    | st.lists(scalars, max_size=2)
    | st.dictionaries(texts, st.lists(scalars, max_size=2) | scalars, max_size=2)
)
messages = st.builds(
    lambda more, role, content: more | {"role": role, "content": content},
    st.dictionaries(texts, values, max_size=2),
    texts,
    texts,
)
rows = st.builds(
    lambda more, found: more | {"messages": found},
    st.dictionaries(texts, values, max_size=1),
    st.lists(messages, min_size=1, max_size=3),
)
SEPARATORS = [(",", ":"), (", ", ": "), (", ", " : "), (" ,", "  :"), (",\t", "\t:"), (",", "\r: ")]


@given(rows, st.sampled_from(SEPARATORS), st.booleans())
@settings(deadline=None, max_examples=100)
def test_written_rows_are_read_back_unchanged(row, separator, ascii_only):
    line = json.dumps(row, separators=separator, ensure_ascii=ascii_only).encode()
    assert repr(parse_row(line, chat_key="messages")) == repr(row["messages"])


def strictly(line):
    """The row by the standard library; ValueError for all that must be refused."""

    def pairs(found):
        if len({key for key, _ in found}) < len(found):
            raise ValueError("duplicate")
        return dict(found)

    def constant(name):
        raise ValueError(name)

    text = line.decode("utf-8")
    row = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # refuses lone surrogates and infinite floats
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list) or not row["messages"]:
        raise ValueError("shape")
    whole = all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in row["messages"]
    )
    if not whole:
        raise ValueError("shape")
    return row["messages"]


TOKENS = [
    b'"',
    b":",
    b",",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\\",
    b"0",
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\\u006f",
    b"e9",
]
TOKENS += [
    b'"role": ""',
    b'"a":1,',
    b'"a" :1,',
    b'"a\\\\":1,',
    b", ",
    b"\t",
    b"\r",
    b"1e999",
    b"NaN",
    b"null",
    b"-",
    b"\xef\xbb\xbf",
]
PIECES = ['"', ":", "\\", " ", '":', '\\":', "\t", "a", "é", "\u2028", "😀", "{", "]"]


def damaged(random):
    """A row, often with keys that stand twice, often with bytes put in, taken out or replaced."""

    def text():
        return "".join(random.choices(PIECES, k=random.randrange(4)))

    def value(depth=0):
        if depth < 2 and random.random() < 0.3:
            return json_object([(text(), value(depth + 1)) for _ in range(random.randrange(3))])
        return random.choice(
            [json.dumps(text()), "1", "-0.5e3", "null", "[true]", json.dumps([text(), {text(): text()}])]
        )

    def json_object(pairs):
        comma, colon = random.choice(SEPARATORS)
        return "{" + comma.join(json.dumps(k, ensure_ascii=random.random() < 0.5) + colon + v for k, v in pairs) + "}"

    found = []
    for _ in range(random.randint(1, 2)):
        pairs = [("role", json.dumps(text())), ("content", json.dumps(text(), ensure_ascii=False))]
        pairs += [(random.choice(["role", "a\\", text()]), value()) for _ in range(random.choice([0, 0, 1, 2]))]
        random.shuffle(pairs)
        found.append(json_object(pairs))
    line = json_object(
        [(text(), value()) for _ in range(random.choice([0, 0, 1]))] + [("messages", "[" + ",".join(found) + "]")]
    ).encode()
    for _ in range(random.choice([0, 0, 1, 2])):
        start = random.randrange(len(line) + 1)
        end = start + random.choice([0, 0, 1, 1, 2, 9])
        line = line[:start] + random.choice([b"", *TOKENS]) + line[end:]
    return line


KNOWN = [
    b'{"messages":[{"role":"","content":"","a\\\\":1,"b":1,"b":2}]}',
    b'{"messages":[{"role":"","content":"\\":","a\\\\":1,"a\\\\":2}]}',
]


@pytest.mark.usefixtures("both_counts")
def test_r_file_7_damage_never_gives_another_row():
    seen = collections.Counter()
    random = Random(20260822)
    for line in (*KNOWN, *(damaged(random) for _ in range(5_000))):
        try:
            expected = repr(strictly(line))
        except (ValueError, RecursionError):
            expected = None
        try:
            found = repr(parse_row(line, chat_key="messages"))
            seen["read"] += 1
        except LineError as fault:
            found = None
            seen[fault.kind] += 1
            seen["outside"] += not 0 <= fault.offset <= len(line)
        assert found == expected, line
    assert not seen["outside"]
    for kind, least in [
        ("read", 1000),
        ("duplicate_key", 200),
        ("invalid_json", 200),
        ("invalid_utf8", 50),
        ("lone_surrogate", 10),
    ]:
        assert seen[kind] >= least, seen
