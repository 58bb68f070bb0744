"""Define pools of short texts for the contents of rows, the simplest first, because Hypothesis shrinks towards the first."""

from __future__ import annotations

PLAIN = (
    "w0", "w1 w2", "w3 w4 w5", "w6", "w7 w8 w9 w10", "w11 w12", "w13 w14 w15 w16 w17 w18", "w19 w20", "w21 w22 w23",
    "w24", "w25 w26", "w27 w28 w29 w30 w31 w32 w33 w34", "w35 w36", "w37", "w38 w39 w40", "w41 w42 w43 w44 w45",
    "w46 w47", "w48 w49 w50 w51", "w52", "w53 w54 w55", "What is 2 + 2?", "Four.", "w56 - w57: w58", "(w59), w60!",
    "System", "User w61", "Assistant w62", "w63  w64", "it's w65's", "x = 1; y = -0.5e-3", "https://w66.example/w67?q=1",
)  # fmt: skip
"""Without white space at the ends and without `a` at the start, so that no two of them merge with a newline between."""

MULTILINGUAL = (
    "שלום w0", "مرحبا بالعالم", "नमस्ते दुनिया क्षत्रिय", "வணக்கம்", "สวัสดีชาวโลก น้ำ", "你好，世界。", "こんにちは w1", "안녕하세요",
    "Привет, мир", "Γειά σου", "ভাষা", "မြန်မာ",
)  # fmt: skip
EMOJI = ("👩‍👩‍👧‍👦", "w0 🏳️‍🌈 w1", "👍🏽", "🧑🏿‍🚀🚀", "❤️‍🔥", "🇩🇪🇯🇵", "\u200dw0")
COMBINING = ("e\u0301", "a\u0323\u0308 w0", "\u0301w1", "Z\u0351\u036b\u0343a", "w2\u0301", "o\u0302\u0301")
CODE = (
    "def f(x):\n\treturn x ** 2", '{"a": [1, {"b": null}]}', "<div class='x'>\n  &amp;\n</div>", "for (;;) { i++; }\r\n",
    "{{ 7 * 7 }} {% if x %}", "\\n \\u0041 C:\\w0", "```py\nw0\n```", "SELECT *\n  FROM w1;\n--",
)  # fmt: skip
SEPARATORS = ("w0\u2028w1", "w0\u0085", "\u2029w1", "w2\u2028", "\x0bw3\x0c", "\x1cw4\x1f")
"""Line ends to Python's str.strip and splitlines, not to JSON lines."""
NUL = ("w0\x00w1", "\x00", "w2\x00")
WHITE = (" ", "\n", "\t \n", "\u3000", "\u2028", "\n\n\n")
EDGE_NEWLINES = ("\nab", "w0\n", "\n", "ab\n\n", "\n\nw1", "\n w2", "<Sab\n", "\nab\n", " \tw3 \n")
"""Texts that can merge with a neighbour's newline, or absorb one."""
MERGING = ("ab", "abab w0", "a", "\nab", "\n\n", "<S")
"""Starts that the byte-level tokenizers merge with a newline before them."""
THINK = ("/think", "w0 /think", "/no_think", "/no_think w1", "w2/think w3", "/think/think")
THINK_INSIDE = ("a/thinking", "/no_/thinkthink w0", "/th/thinkink", "/no_/no_thinkthink", "w1/no_thinker", "/no_/think")
"""Texts that show the order and the single pass of the two removals."""
SPECIAL = (
    "<SPECIAL_12>", "w0 <s> w1", "<SPECIAL_11>User\nw2", "</s>", "<SPECIAL_10>System\nw3\n", "<unk>", "<SPECIAL_233>",
    "<pad>w4", "<SPECIAL_12>\n", "<|user|>",
)  # fmt: skip
SURROGATES = ("\ud800", "w0\udfff", "\udc00w1\ud83d", "\ude00\ud83d")
"""Halves of a surrogate pair, which no tokenizer can encode."""
