"""`--fed`: what the ranks of a job really fed, on either path, held against what the reference makes of the same files."""

import json
from pathlib import Path

import pytest
from diff_row_fakes import described
from safetensors.torch import load_file, save_file

from production.parallel.sizes import RankCoordinates
from production.training.config import load, multi_token_depths
from production.training.data.batch_dump import dump
from production.training.data.batch_stream import BatchStream

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENIZER = str(EXAMPLES / "tokenizers" / "nemotron-mini")
WORDS = ["river", "stone", "lamp", "cloud", "paper", "seven", "green", "quick", "under", "table", "music", "north"]
DEPTHS = {"policy.megatron_cfg.mtp_num_layers": 2, "policy.megatron_cfg.mtp_use_repeated_layer": True}
ONLINE = {
    "data.train.dataset_name": "openai_format",
    "data.default.megatron_sft_prompt_format": None,
    "policy.sequence_packing.enabled": True,
    "policy.train_global_batch_size": 6,
    "policy.max_total_sequence_length": 64,
    "loss.normalization": "global_valid_tokens",
}
TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"


def conversation(number, answer):
    said = [" ".join(WORDS[(number + place) % len(WORDS)] for place in range(count)) for count in (2, answer)]
    return [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]


@pytest.fixture
def chat(tmp_path):
    """Conversations of several lengths."""
    lines = [json.dumps({"messages": conversation(number, 2 + 5 * number % 17)}) for number in range(12)]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def packed(tmp_path):
    """Rows of three conversations each."""
    system = {"role": "system", "content": ""}
    lines = [
        json.dumps({"messages": [m for each in range(3) for m in (system, *conversation(number + each, 3 + each))]})
        for number in range(8)
    ]
    path = tmp_path / "rows.jsonl.packed"
    path.write_text("\n".join(lines) + "\n")
    return path


def job_of(folder, data, changes):
    """The small job of the examples on this file, in the order of its rows and without depths."""
    keys = {
        "policy.tokenizer.name": TOKENIZER,
        "policy.max_total_sequence_length": 128,
        "policy.megatron_cfg.mtp_num_layers": None,
        "policy.megatron_cfg.mtp_use_repeated_layer": False,
        "data.train.data_path": str(data),
        "data.shuffle": False,
        "data.num_workers": 0,
        "logger.log_dir": str(folder / "logs"),
        **changes,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    return load(str(EXAMPLES / "jobs" / "small-cpu.yaml"), overrides)


def places(tp=1, cp=1, dp=1, pp=1):
    world = tp * cp * dp * pp
    for rank in range(world):
        yield RankCoordinates(
            rank=rank,
            world_size=world,
            tensor_rank=rank % tp,
            context_rank=rank // tp % cp,
            context_size=cp,
            data_rank=rank // (tp * cp) % dp,
            data_size=dp,
            pipeline_rank=rank // (tp * cp * dp),
            pipeline_size=pp,
        )


def write(tmp_path, data, changes, **sizes):
    """The second step of a job, as each of its ranks dumps it."""
    names = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model"}
    layout = {f"policy.megatron_cfg.{names[each]}_parallel_size": size for each, size in sizes.items() if each in names}
    job, folder = job_of(tmp_path, data, layout | changes), tmp_path / "dumps" / "step_00000002"
    for place in places(**sizes):
        with BatchStream(job, place) as feed:
            steps = feed.steps()
            next(steps)
            fed = next(steps)
            dump(
                folder,
                fed,
                place=place,
                normalization=job.loss.normalization,
                depths=multi_token_depths(job),
                provenance=feed.provenance(),
                locations=[feed.locate(sample) for sample in fed.samples],
            )
    return folder


def write_either(tmp_path, data, path):
    """A step with depths on two cp ranks, of either path."""
    online = ONLINE | {"policy.make_sequence_length_divisible_by": 4} if path == "online" else {}
    return write(tmp_path, data, DEPTHS | online, cp=2)


def change(folder, rank, to):
    path = folder / f"rank_{rank}.safetensors"
    tensors = load_file(path)
    save_file({name: to(name, tensor).clone() for name, tensor in tensors.items()}, path)


def step_of(found, label):
    return next(step for step in found["steps"] if label == _label(step))


def _label(step):
    return f"{step['step']}, depth {step['depth']}" if step["depth"] else step["step"]


@pytest.mark.parametrize("changes", [{}, DEPTHS], ids=["no depths", "two depths"])
def test_what_a_job_fed_is_what_the_reference_makes(run, packed, tmp_path, changes):
    folder = write(tmp_path, packed, changes, cp=2, dp=2)
    status, found = described(run, "--fed", folder)
    assert (status, found["equal"]) == (0, True)
    assert [(each["rank"], each["row"], each["line"], each["first"]) for each in found["fed"]["looked_at"]] == [
        *((0, 4, 5, ""), (0, 6, 7, ""), (1, 4, 5, ""), (1, 6, 7, "")),
        *((2, 5, 6, ""), (2, 7, 8, ""), (3, 5, 6, ""), (3, 7, 8, "")),
    ]
    _, out, _ = run("--fed", folder, columns=200)
    joined = "".join(out.split())  # a long path wraps anywhere
    assert joined.count(f"{packed}row4(fileline5)") == 3, "of two ranks, and the head of the row that is shown"
    last, lacks = ("share, depth 2", "microbatch, depth 1, depth 2") if changes else ("share", "microbatch")
    claim = f"every tensor at every step up to {last} (fed has no {lacks}: not compared there)"
    assert claim in " ".join(out.split())
    for label in ("share", "share, depth 1", "share, depth 2") if changes else ("share",):
        fed = step_of(found, label)["sides"]["fed"]
        assert set(fed) >= {"input_ids", "target_ids", "token_mask", "position_ids"}


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, {"dp": 2}),
        (DEPTHS, {"cp": 2, "dp": 2}),
        ({"policy.sequence_packing.algorithm": "first_fit_decreasing"}, {"cp": 2, "pp": 2}),
        ({"policy.sequence_packing.algorithm": "first_fit_shuffle"} | DEPTHS, {"tp": 2}),
        ({"policy.sequence_packing.algorithm": "concatenative", "policy.sequence_packing.train_mb_tokens": 80}, {}),
        ({"policy.tokenizer.chat_template": TEMPLATE}, {"dp": 2}),
    ],
    ids=["bins of two ranks", "depths and cp", "stages", "shuffled, tp", "one rank", "the job's own template"],
)
def test_bins_of_the_online_path_are_those_of_the_reference(run, chat, tmp_path, changes, sizes):
    multiple = 4 if "cp" in sizes else 2
    changes = ONLINE | {"policy.make_sequence_length_divisible_by": multiple} | changes
    folder = write(tmp_path, chat, changes, **sizes)
    status, found = described(run, "--fed", folder)
    looked_at = found["fed"]["looked_at"]
    assert (status, found["equal"], {each["first"] for each in looked_at}) == (0, True, {""})
    assert len(looked_at) > 1
    assert {(each["row"], each["line"]) for each in looked_at} == {(None, None)}
    lines = [line for _, line in found["row"]["source"]["bin"]]
    assert lines
    assert set(lines) <= set(range(7, 13)), "the second global batch of six"
    assert looked_at[0]["told"].startswith(f"bin of {len(lines)} (file line")
    assert [each["roles"] for each in found["row"]["conversations"]] == [["user", "assistant"]] * len(lines)
    assert all(each["state"] == "kept" for each in found["row"]["conversations"])
    depths = multi_token_depths(job_of(tmp_path, chat, changes))
    assert [_label(step) for step in found["steps"] if step["step"] != "slice"] == [
        *("row", "batch", "share"),
        *(f"share, depth {each}" for each in range(1, depths + 1)),
    ]
    assert set(step_of(found, "batch")["sides"]["fed"]) == set(step_of(found, "batch")["sides"]["reference"])
    assert all("kind" not in side for step in found["steps"] for side in step["sides"].values())
    assert "position_ids" not in step_of(found, "share")["sides"]["fed"], "no model is given them online (R-ONLINE-7)"


def test_all_conversations_of_a_global_batch_are_fed_once(run, chat, tmp_path):
    folder = write(tmp_path, chat, ONLINE, dp=2)
    lines = []
    for each in described(run, "--fed", folder)[1]["fed"]["looked_at"]:
        at = ("--rank", each["rank"], "--microbatch", each["microbatch"])
        lines += [line for _, line in described(run, "--fed", folder, *at)[1]["row"]["source"]["bin"]]
    assert sorted(lines) == list(range(7, 13))


def test_bins_that_went_to_another_rank_are_found_at_the_row(run, chat, tmp_path):
    folder = write(tmp_path, chat, ONLINE, dp=2)
    other = load_file(folder / "rank_0.safetensors")
    save_file(other, folder / "rank_1.safetensors")
    status, found = described(run, "--fed", folder)
    assert (status, found["first"]) == (1, "row")
    assert {each["rank"] for each in found["fed"]["looked_at"] if not each["equal"]} == {1}
    status, out, _ = run("--fed", folder, "--html", tmp_path / "page.html")
    assert status == 1
    assert "DIFFERENT first at step row" in out
    assert "bin of" in (tmp_path / "page.html").read_text()


def test_a_bin_that_one_side_alone_has_is_a_difference(run, chat, tmp_path):
    folder = write(tmp_path, chat, ONLINE | {"policy.max_total_sequence_length": 56})
    path = folder / "rank_0.safetensors"
    tensors = load_file(path)
    last = max(int(name.split(".")[0].removeprefix("microbatch_")) for name in tensors)
    assert last > 0
    save_file({name: each for name, each in tensors.items() if not name.startswith(f"microbatch_{last}.")}, path)
    status, found = described(run, "--fed", folder)
    assert (status, found["first"]) == (1, "row")
    assert [each["microbatch"] for each in found["fed"]["looked_at"] if not each["equal"]] == [last]
    assert f"the rank fed {last} microbatches" in run("--fed", folder, columns=200)[1]
    again = {
        name.replace("microbatch_0.", f"microbatch_{last + 1}."): each.clone()
        for name, each in tensors.items()
        if name.startswith("microbatch_0.")
    }
    save_file(tensors | again, path)
    status, found = described(run, "--fed", folder)
    assert (status, [each["microbatch"] for each in found["fed"]["looked_at"] if each["first"]]) == (1, [last + 1])
    assert f"the reference packs {last + 1} bins" in run("--fed", folder, columns=200)[1]


@pytest.mark.parametrize("path", ["direct", "online"])
def test_a_depth_that_is_another_is_named(run, packed, chat, tmp_path, path):
    folder = write_either(tmp_path, packed if path == "direct" else chat, path)
    second = load_file(folder / "rank_1.safetensors")
    change(folder, 1, lambda name, _: second[name.replace("depth_1", "depth_2")])
    status, found = described(run, "--fed", folder)
    assert (status, found["first"], found["place"]["rank"]) == (1, "share, depth 1", 1)
    told = step_of(found, "share, depth 1")["differences"]
    assert {each["right"] for each in told} == {"fed"}
    assert "that of depth 2" in {each["cause"] for each in told if each["tensor"] == "input_ids"}


def test_a_label_of_the_share_alone_is_found_online(run, chat, tmp_path):
    folder = write(tmp_path, chat, ONLINE | {"policy.make_sequence_length_divisible_by": 4}, cp=2)

    def leaky(name, tensor):
        tensor = tensor.clone()
        if name == "microbatch_0.share.target_ids":
            tensor[0, 3] += 1
        return tensor

    change(folder, 1, leaky)
    status, out, _ = run("--fed", folder, columns=140)
    assert status == 1
    assert "DIFFERENT first at step share in target_ids at place 3" in out
    status, found = described(run, "--fed", folder)
    assert [(each["rank"], each["microbatch"]) for each in found["fed"]["looked_at"] if each["first"]] == [(1, 0)]


def test_a_rank_that_fed_another_ranks_share_is_named(run, packed, tmp_path):
    folder = write(tmp_path, packed, {}, cp=2, dp=2)
    mine = load_file(folder / "rank_2.safetensors")
    change(folder, 3, lambda name, tensor: mine[name] if ".share." in name else tensor)
    status, out, _ = run("--fed", folder)
    assert status == 1
    assert "8 microbatches of 4 ranks against the reference, 2 differ" in " ".join(out.split())
    assert "DIFFERENT first at step share in " in out
    assert "what cp rank 0 owns" in out
    status, found = described(run, "--fed", folder)
    assert (status, found["equal"], found["place"]["rank"]) == (1, False, 3)
    assert {each["rank"] for each in found["fed"]["looked_at"] if not each["equal"]} == {3}
    assert run("--fed", folder, "--rank", 2)[0] == 0


def test_a_row_that_the_job_built_otherwise_is_found_at_the_row(run, packed, tmp_path):
    folder = write(tmp_path, packed, {})

    def leaky(name, tensor):
        tensor = tensor.clone()
        if name == "microbatch_0.row.target_ids":
            tensor[0, 4] = 77
        return tensor

    change(folder, 0, leaky)
    status, found = described(run, "--fed", folder)
    assert (status, found["first"]) == (1, "row")
    told = step_of(found, "row")["differences"][0]
    assert (told["tensor"], told["position"], told["right"], told["right_value"]) == ("target_ids", 4, "fed", 77)


def test_rows_are_made_with_what_the_job_says_and_not_with_defaults(run, packed, tmp_path):
    changes = {
        "data.default.megatron_sft_prompt_format": "default",
        "policy.tokenizer.chat_template": TEMPLATE,
        "data.train.semantics": "strict",
        "data.train.megatron_sft_context_parallel_size": 2,
    }
    folder = write(tmp_path, packed, changes, cp=2)
    status, found = described(run, "--fed", folder)
    assert (status, found["equal"]) == (0, True)
    settings = found["row"]["settings"]
    assert (settings["prompt_format"], settings["semantics"]) == ("default", "strict")
    assert (settings["pack_length"], settings["context_parallel_size"]) == (128, 2)
    assert found["row"]["tokenizer"] == TOKENIZER
    assert "default (of the dump) · P 128 (of the dump) · cp 2 (of the dump)" in run("--fed", folder, columns=200)[1]
    for file in folder.glob("rank_*.rows.json"):
        said = json.loads(file.read_text())
        said["made_with"]["chat_template"] = None
        file.write_text(json.dumps(said))
    assert run("--fed", folder, columns=200)[0] == 1, "the tokenizer's own template makes other rows"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rank", 9], "has no rank 9"),
        (["--microbatch", 9], "fed 2 microbatches"),
        (["--depth", 1], "the dump says its own depths"),
        (["--stop-at", "weights"], "no whole depths and no weights"),
        (["--row", 1], "the dump names its own rows"),
        (["--pack-length", 64, "--prompt-format", "identity"], "--prompt-format, --pack-length: the dump says what"),
        (["--chat-key", "said"], "--chat-key: the dump says what its rows were made with"),
        (["--stop-at", "share", "--dump-row", 1], "--dump-row: the dump says what"),
        (["--cp", 2], "the dump says its own layout"),
        (["--sides", "reference,production"], "held against the reference"),
    ],
)
def test_a_dump_is_asked_only_for_what_it_holds(run, packed, tmp_path, arguments, says):
    folder = write(tmp_path, packed, {}, dp=2)
    status, _, err = run("--fed", folder, *arguments)
    assert status == 2
    assert says in err
    assert "To fix it: " in err


def test_a_file_that_is_not_a_dump_is_refused(run, packed, tmp_path):
    folder = write(tmp_path, packed, {}, dp=2)
    assert "must hold rank_R.safetensors" in run("--fed", tmp_path)[2]
    assert f"To fix it: give one of the steps in it: --fed {folder}" in run("--fed", folder.parent)[2]
    assert f"--fed {folder} --rank 1" in run("--fed", folder / "rank_1.safetensors")[2]
    said = json.loads((folder / "rank_0.rows.json").read_text())
    del said["made_with"]
    (folder / "rank_0.rows.json").write_text(json.dumps(said))
    assert "missing required field `made_with`" in run("--fed", folder)[2]
    (folder / "rank_0.rows.json").write_text("[]")
    assert "dump the step again" in run("--fed", folder)[2]
    half = {name: each for name, each in load_file(folder / "rank_1.safetensors").items() if "token_mask" not in name}
    save_file(half, folder / "rank_1.safetensors")
    assert "lacks the tensor 'microbatch_0.row.token_mask'" in run("--fed", folder, "--rank", 1)[2]


def test_a_rank_or_a_microbatch_that_is_not_there_is_no_equal_one(run, packed, tmp_path):
    folder = write(tmp_path, packed, {}, dp=2)
    path = folder / "rank_1.safetensors"
    tensors = load_file(path)
    save_file({name: each for name, each in tensors.items() if "microbatch_1" not in name}, path)
    for asked in ([], ["--rank", 1]):
        status, _, err = run("--fed", folder, *asked)
        assert status == 2
        assert "rank 1 names 2 rows and has 1 microbatches" in err
    save_file({}, path)
    assert "rank 1 names 2 rows and has 0 microbatches" in run("--fed", folder, "--rank", 1)[2]
    path.unlink()
    status, _, err = run("--fed", folder)
    assert status == 2
    assert "no file of rank 1, of 2 ranks that the job had" in err
    save_file(tensors, path)
    said = json.loads((folder / "rank_1.rows.json").read_text())
    said["made_with"]["rows"]["semantics"] = "strict"
    (folder / "rank_1.rows.json").write_text(json.dumps(said))
    assert "ranks 0 and 1 were not dumped by one job" in run("--fed", folder)[2]
    assert run("--fed", folder, "--rank", 0)[0] == 0


@pytest.mark.parametrize("path", ["direct", "online"])
def test_each_tensor_that_was_dumped_is_looked_at(run, packed, chat, tmp_path, path):
    folder = write_either(tmp_path, packed if path == "direct" else chat, path)
    sound = load_file(folder / "rank_1.safetensors")
    names = sorted(name for name in sound if name.startswith("microbatch_0."))
    assert len(names) > 20
    for name in names:
        others = {each: tensor for each, tensor in sound.items() if each != name}
        save_file(others, folder / "rank_1.safetensors")
        assert run("--fed", folder, "--rank", 1, "--microbatch", 0)[0] == 2, f"without {name}"
        save_file(others | {name: sound[name] + 1}, folder / "rank_1.safetensors")
        assert run("--fed", folder, "--rank", 1, "--microbatch", 0)[0] in (1, 2), f"another {name}"
        save_file(others | {name: sound[name].reshape(-1)[:0]}, folder / "rank_1.safetensors")
        assert run("--fed", folder, "--rank", 1, "--microbatch", 0)[0] in (1, 2), f"an empty {name}"


@pytest.mark.parametrize("path", ["direct", "online"])
def test_what_a_dump_says_is_read_strictly(run, packed, chat, tmp_path, path):
    folder = write(tmp_path, packed, {}) if path == "direct" else write(tmp_path, chat, ONLINE)
    file = folder / "rank_0.rows.json"
    said = json.loads(file.read_text())
    made = said["made_with"]
    damaged = [
        said | {"made_with": {}}, said | {"made_with": None}, said | {"place": {}}, said | {"depths": "x"}, said | {"depths": -1},
        said | {"rows": []}, said | {"rows": None}, said | {"rows": [{"line": 1, "row": 0}]},
        said | {"rows": [each | {"line": "a"} for each in said["rows"]]},
        said | {"place": said["place"] | {"world_size": 0}}, said | {"place": said["place"] | {"world_size": 3, "data_size": 2}},
        said | {"made_with": made | {"rows": made["rows"] | {"pack_length": "x"}}},
        said | {"made_with": made | {"rows": {}}},
        *({**said, "made_with": {n: v for n, v in made.items() if n != name}} for name in made),
        *([said | {"made_with": made | {"bins": made["bins"] | {"algorithm": "best_fit"}}}] if made["bins"] else []),
    ]  # fmt: skip
    for each in damaged:
        file.write_text(json.dumps(each))
        status, out, err = run("--fed", folder)
        assert (status, out, err.count("\n")) == (2, "", 1), each
        assert "To fix it: dump the step again" in err


def test_a_jobs_dump_given_as_a_batch_leads_to_the_option_that_reads_it(run, packed, tmp_path):
    folder = write(tmp_path, packed, {})
    for given, instead in ((folder, f"--fed {folder} "), (folder / "rank_0.safetensors", f"--fed {folder} --rank 0 ")):
        status, _, err = run("--dump", given, "--tokenizer", TOKENIZER)
        assert status == 2
        assert f"a training job's dump of a step, which --dump does not read: give {instead}" in err
    (tmp_path / "other").mkdir()
    assert "is a folder: give a safetensors file" in run("--dump", tmp_path / "other", "--tokenizer", TOKENIZER)[2]


def test_conversations_that_lie_elsewhere_now_are_read_there(run, chat, tmp_path):
    folder = write(tmp_path, chat, ONLINE)
    moved = chat.rename(tmp_path / "moved.jsonl")
    assert f"there is no file {chat}" in run("--fed", folder)[2]
    assert run(moved, "--fed", folder)[0] == 0
    moved.write_text(moved.read_text().replace("stone", "storm"))
    assert run(moved, "--fed", folder)[0] == 1


def test_the_page_of_a_bin_names_its_lines(run, chat, tmp_path):
    folder = write_either(tmp_path, chat, "online")
    html = tmp_path / "bin.html"
    status, _, _ = run("--fed", folder, "--html", html)
    assert status == 0
    assert "microbatch 0, bin of " in html.read_text()
    assert "line None" not in html.read_text()


def test_the_notes_on_a_fed_row_are_those_of_the_job(run, packed, tmp_path):
    """The row's messages are under the job's key, and its template is the one that is judged, not the tokenizer's own."""
    lines = [json.loads(line)["messages"] for line in packed.read_text().splitlines()]
    for messages in lines:
        messages[1]["content"] += " /think <SPECIAL_12>"
    packed.write_text("".join(json.dumps({"said": messages}) + "\n" for messages in lines))
    folder = write(tmp_path, packed, {"data.train.chat_key": "said"})
    status, _, err = run("--fed", folder)
    assert status == 0, err
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert (
        "note: 1 control tokens of the tokenizer stand in contents as text, and become the tokens themselves" in notes
    )
    assert any(note.startswith("note: 1 messages hold /think or /no_think") for note in notes)
    other = {
        "data.default.megatron_sft_prompt_format": "default",
        "policy.tokenizer.chat_template": TEMPLATE.replace("<{{", "<|no_such_marker|><{{"),
    }
    folder = write(tmp_path / "other", packed, {"data.train.chat_key": "said", **other})
    status, _, err = run("--fed", folder)
    assert status == 0, err
    assert "the chat template writes <|no_such_marker|>, which is" in err
    assert "/think" not in err, "this format takes nothing out"


def test_a_bin_has_no_notes_on_a_row(run, chat, tmp_path):
    status, _, err = run("--fed", write_either(tmp_path, chat, "online"))
    assert (status, err) == (0, "")
