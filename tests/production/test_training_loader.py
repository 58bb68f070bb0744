"""R-ORDER-9: what a loader gives is the same for any workers, any resume; faults come at their step, and no process is left."""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from equivalence.generators.tokenizers import load
from production.errors import BatchRefused, PackproofError
from production.files.source import open_source
from production.online.chat import Chat, ChatSettings, ChatTokenizer
from production.online.padded_batch import Conversation
from production.rows.batch import BatchSettings, collate, count_trained, pad_validation, take_rank
from production.rows.builder import RowBuilder, RowSettings
from production.training.data.dataset import BadRow, ConversationData, PackedData
from production.training.data.fingerprint import ResumeRefused, check_resume, fingerprint, tokenizer_identity
from production.training.data.loader import Loader, LoaderSettings
from production.training.data.order import Order, ValidationOrder
from production.training.data.prefetcher import Planned, Prefetcher
from production.training.data.worker_process import WorkerDied, WorkerProcess
from production.training.metrics.token_counts import RowCounts
from production.training.order_settings import OrderSettings

SETTINGS = RowSettings(pack_length=16, prompt_format="identity")
GUARDS = BatchSettings(context_parallel_size=1, data_parallel_size=2, global_batch_size=4)
IN_ORDER = OrderSettings(kind="sequential", last_batch="wrap", global_batch_size=4, data_parallel_size=2)
SHUFFLED = OrderSettings(kind="shuffle", seed=3, last_batch="wrap", global_batch_size=4, data_parallel_size=2)


def line(number):
    """A row that can be told apart from all others: it begins with the number's digits as words; some are cut."""
    digits = " ".join(f"w{digit}" for digit in f"{number:03}")
    return {
        "messages": [
            {"role": "system", "content": f"{digits} {'w5 ' * (number * 7 % 11)}"},
            {"role": "assistant", "content": "w2 w3 " * (number * 5 % 6 + 1)},
        ]
    }


def write(folder, lines, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines))
    return open_source(path)


@pytest.fixture
def data(tmp_path):
    return PackedData(
        sources=[write(tmp_path, map(line, range(23)))], tokenizer=load("word"), settings=SETTINGS, guards=GUARDS
    )


def loader(data, order=None, *, share=(0, 2), consumed=0, **how):
    how = {"workers": 0} | how
    order = Order(data.rows, SHUFFLED) if order is None else order
    return Loader(data, order, share=share, settings=LoaderSettings(**how), consumed_samples=consumed)


def bits(prepared):
    """All that a step is made of, without how long it was waited for."""
    tensors = {field.name: getattr(prepared.batch, field.name) for field in dataclasses.fields(prepared.batch)}
    return (
        prepared.step,
        prepared.epoch,
        prepared.consumed_samples,
        prepared.samples,
        prepared.counts,
        [(name, tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in tensors.items()],
    )


def steps(loader, count):
    return [bits(prepared) for prepared in itertools.islice(loader, count)]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until_gone(pids, seconds=60.0):
    until = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        assert time.monotonic() < until, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.01)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (1, 4), (2, 3), (3, 1)])
def test_r_order_9_any_number_of_workers_gives_the_same_bits(data, workers, prefetch):
    data.group = 1 if workers > 1 else data.group
    alone = steps(loader(data), 14)
    assert len({step[3] for step in alone}) == 14
    with loader(data, workers=workers, prefetch=prefetch) as many:
        assert steps(many, 14) == alone


def test_r_order_9_the_rows_of_a_step_are_those_of_the_order_as_the_builder_makes_them(data):
    builder = RowBuilder(tokenizer=load("word"), settings=SETTINGS)
    order = Order(data.rows, SHUFFLED)
    for rank in range(2):
        with loader(data, share=(rank, 2), workers=1) as found:
            for prepared, consumed in zip(found, range(0, 40, 4), strict=False):
                rows = [line(sample.row)["messages"] for sample in order.batch_at(consumed).samples]
                whole = collate([builder.build(messages) for messages in rows])
                expected = take_rank(whole, rank=rank, size=2)
                for field in dataclasses.fields(expected):
                    ours, theirs = getattr(prepared.batch, field.name), getattr(expected, field.name)
                    if field.name == "packed_cu_seqlens":  # as wide as the rank's own rows need
                        theirs = theirs[:, : ours.shape[1]]
                    assert torch.equal(ours, theirs), field.name
                counts = sum((RowCounts.of_row(builder.build(rows[place])) for place in (rank, rank + 2)), RowCounts())
                # The format identity masks nothing, so each row's system message trains; the builder alone does not count it.
                assert prepared.counts == dataclasses.replace(counts, prompt_messages_trained=2)
    assert prepared.step == 9


def test_r_order_2_any_step_is_resumed_exactly_with_another_number_of_workers(data):
    alone = steps(loader(data), 12)
    for taken, before, after in ((0, 1, 2), (1, 2, 0), (5, 0, 1), (6, 2, 1)):
        with loader(data, workers=before, prefetch=3) as first:
            assert steps(first, taken) == alone[:taken]
            state = json.loads(json.dumps(first.state()))
        with loader(data, workers=after, consumed=state["consumed_samples"]) as second:
            assert steps(second, 12 - taken) == alone[taken:]


def test_r_order_2_restoring_discards_prepared_batches(data):
    alone = steps(loader(data), 12)
    with loader(data, workers=2, prefetch=4) as found:
        for start in (7, 2, 0, 9, 9):
            found.restore(4 * start)
            assert found.state() == {"consumed_samples": 4 * start}
            assert steps(found, 3) == alone[start : start + 3]
        with pytest.raises(PackproofError, match="must be a multiple of the global batch size"):
            found.restore(5)
        assert found.state() == {"consumed_samples": 48}


def test_r_order_2_a_step_that_is_planned_while_another_position_is_restored_is_thrown_away(data):
    order, made = Order(data.rows, IN_ORDER), []

    def plan(consumed):
        if not made:
            made.append(consumed)
            prefetcher.seek(8)  # as the training process may at this very moment
        whole = order.batch_at(consumed)
        return Planned(
            step=whole.step,
            epoch=0,
            samples=whole.samples,
            weights=whole.weights,
            consumed_samples=whole.consumed_samples,
        )

    prefetcher = Prefetcher(
        workers=[WorkerProcess(0, data)],
        plan=plan,
        assemble=lambda planned, wired: (planned.step, len(wired)),
        group=2,
        prefetch=2,
        stuck_seconds=20,
        pin_memory=False,
    )
    try:
        prefetcher.seek(0)
        assert [prefetcher.next()[1] for _ in range(3)] == [(2, 4), (3, 4), (4, 4)]
    finally:
        prefetcher.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_r_order_3_the_end_is_the_end_however_often_it_is_asked(data, workers):
    order = Order(data.rows, dataclasses.replace(SHUFFLED, last_batch="drop", max_epochs=2))
    with loader(data, order, workers=workers, prefetch=4) as found:
        assert len(list(found)) == order.total_steps == 10
        assert list(found) == []
        found.restore(36)
        assert len(list(found)) == 1


def test_r_order_6_a_blend_reads_each_of_its_files(tmp_path):
    sources = [write(tmp_path, map(line, rows), f"{rows.start}.jsonl") for rows in (range(7), range(100, 109))]
    data = PackedData(sources=sources, tokenizer=load("word"), settings=SETTINGS, guards=GUARDS)
    order = Order(data.rows, dataclasses.replace(SHUFFLED, weights=(0.75, 0.25)))
    with loader(data, order, share=None, workers=2, prefetch=2) as found:
        seen = [
            (sample.source, int("".join(str(token - 12) for token in ids[:3])))
            for prepared in itertools.islice(found, 10)
            for sample, ids in zip(prepared.samples, prepared.batch.input_ids.tolist(), strict=True)
        ]
    assert {number >= 100 for source, number in seen if source} == {True}
    assert {number >= 100 for source, number in seen if not source} == {False}
    assert sum(source for source, _ in seen) == len(seen) / 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_is_refused_comes_at_its_step_with_row_file_and_line(tmp_path, workers):
    lines = [line(number) for number in range(12)]
    lines[6] = {"messages": [{"role": "system", "content": "w1"}, {"role": "assistant", "content": ""}]}
    settings = dataclasses.replace(
        SETTINGS, semantics=dataclasses.replace(SETTINGS.semantics, turn_rules="every_format")
    )
    data = PackedData(sources=[write(tmp_path, lines)], tokenizer=load("word"), settings=settings, guards=GUARDS)
    order = Order(
        data.rows, OrderSettings(kind="sequential", last_batch="wrap", global_batch_size=4, data_parallel_size=2)
    )
    for lined in lines:
        lined["messages"].insert(1, {"role": "user", "content": "w9"})
    data = PackedData(sources=[write(tmp_path, lines)], tokenizer=load("word"), settings=settings, guards=GUARDS)
    with loader(data, order, workers=workers, prefetch=3) as found:
        assert next(found).step == 0
        for _ in range(2):  # and again where it is asked for again
            with pytest.raises(BadRow) as caught:
                next(found)
            assert (caught.value.kind, caught.value.row, caught.value.line) == ("empty_assistant", 6, 7)
            assert caught.value.file.endswith("rows.jsonl")
            assert "rows.jsonl, line 7 (row 6), conversation 0, turn 2" in str(caught.value)
            assert found.state() == {"consumed_samples": 4}
        found.restore(8)
        assert next(found).step == 2
    with loader(data, order, share=(1, 2), workers=workers) as other:
        assert len(steps(other, 3)) == 3  # the row is not this rank's


@pytest.mark.parametrize("workers", [0, 1])
def test_a_line_that_cannot_be_read_is_named_like_a_row_that_is_refused(tmp_path, workers):
    lines = [line(0), line(1), '{"messages": [{"role": "system"}]}\n', line(3)]
    data = PackedData(sources=[write(tmp_path, lines)], tokenizer=load("word"), settings=SETTINGS, guards=GUARDS)
    with loader(data, Order(data.rows, IN_ORDER), workers=workers) as found, pytest.raises(BadRow) as caught:
        steps(found, 3)
    assert (caught.value.row, caught.value.line) == (2, 3)
    assert "(row 2)" in caught.value.where


class Broken(PackedData):
    """Fails, dies or hangs at one row."""

    row = 6
    how = "raise"

    def prepare(self, samples):
        if any(sample.row == self.row for sample in samples):
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "leave":
                os._exit(7)
            if self.how == "raise":
                raise RuntimeError("a fault of the recipe")
            time.sleep(60)
        return super().prepare(samples)


def broken(tmp_path, how):
    data = Broken(
        sources=[write(tmp_path, map(line, range(23)))], tokenizer=load("word"), settings=SETTINGS, guards=GUARDS
    )
    data.how, data.group = how, 1
    return data


@pytest.mark.parametrize(
    ("how", "text"),
    [("die", "ended by SIGKILL"), ("leave", "ended with exit code 7"), ("raise", "ended with exit code 1")],
)
def test_a_worker_that_dies_is_named_with_its_row_and_nothing_hangs(tmp_path, capfd, how, text):
    data = broken(tmp_path, how)
    with loader(data, Order(data.rows, IN_ORDER), workers=2) as found:
        pids = [worker.pid for worker in found.workers]
        for _ in range(2):
            with pytest.raises(WorkerDied) as caught:
                steps(found, 5)
            assert text in caught.value.what
            assert "at step 1, source 0, rows 6" in caught.value.what
            assert any(str(pid) in caught.value.where for pid in pids)
    wait_until_gone(pids)
    assert ("a fault of the recipe" in capfd.readouterr().err) == (how == "raise")


def test_a_worker_that_hangs_is_named_and_ended(tmp_path):
    data = broken(tmp_path, "hang")
    found = loader(data, Order(data.rows, IN_ORDER), workers=2, stuck_seconds=0.4)
    pids = [worker.pid for worker in found.workers]
    with found, pytest.raises(PackproofError, match=r"step 1 is not ready after 0.4 s.*rows 6"):
        steps(found, 5)
    wait_until_gone(pids)


def test_batches_that_the_guards_refuse_come_at_their_step(data):
    wrong = PackedData(
        sources=data._sources,
        tokenizer=load("word"),
        settings=SETTINGS,
        guards=dataclasses.replace(GUARDS, context_parallel_size=2),
    )
    for workers in (0, 1):
        with loader(wrong, workers=workers) as found, pytest.raises(BatchRefused, match="context parallel size"):
            next(found)


def test_workers_end_with_the_context_and_with_the_loader_itself(data):
    before = threading.active_count()
    with loader(data, workers=2) as found:
        pids = [worker.pid for worker in found.workers]
        assert all(map(is_alive, pids))
        kept = next(found)
    assert not any(map(is_alive, pids))
    assert kept.batch.input_ids.shape == (2, 16)
    with pytest.raises(PackproofError, match="the loader is closed"):
        next(found)
    found.close()
    forgotten = loader(data, workers=2)
    pids = [worker.pid for worker in forgotten.workers]
    del forgotten
    gc.collect()
    wait_until_gone(pids)
    failing = loader(data, workers=1)
    with pytest.raises(ZeroDivisionError), failing:
        _ = 1 / 0
    assert not is_alive(failing.workers[0].pid)
    assert threading.active_count() == before


def test_workers_ignore_a_jobs_signals_so_that_it_can_finish_its_step(data):
    alone = steps(loader(data), 8)
    with loader(data, workers=2, prefetch=1) as found:
        given = steps(found, 2)
        for worker in found.workers:
            os.kill(worker.pid, signal.SIGTERM)
            os.kill(worker.pid, signal.SIGINT)
        time.sleep(0.05)
        assert given + steps(found, 6) == alone


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise SystemExit(3)", 3),
    ],
)
def test_no_worker_outlives_a_process_however_it_ends(data, tmp_path, end, code):
    # Forked, as every job's process is here; its loaders are two, one opened inside the other's life.
    out = tmp_path / "pids"
    pid = os.fork()
    if not pid:
        status = 99
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            first, second = loader(data, workers=2), loader(data, workers=1)
            next(first)
            out.write_text(" ".join(str(worker.pid) for worker in (*first.workers, *second.workers)))
            exec(end)
        except SystemExit as error:
            first.close()
            second.close()
            status = error.code
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code
    pids = [int(each) for each in out.read_text().split()]
    assert len(pids) == 3
    wait_until_gone(pids)


def test_no_worker_outlives_an_interpreter_that_ends_without_closing():
    source = textwrap.dedent(
        """
        from production.training.data.loader import Loader, LoaderSettings
        from production.training.data.order import Order
        from production.training.order_settings import OrderSettings
        class Recipe:
            rows, group = (8,), 1
            def prepare(self, samples): return [sample.row for sample in samples]
            def to_wire(self, item): return {"row": item}
            def from_wire(self, wire): return wire["row"]
            def assemble(self, items, weights): return list(items), None
        order = Order((8,), OrderSettings(kind="sequential", last_batch="wrap", global_batch_size=2, data_parallel_size=1))
        found = Loader(Recipe(), order, share=(0, 1), settings=LoaderSettings(workers=2))
        print(next(found).batch, *(worker.pid for worker in found.workers))
        raise RuntimeError
        """
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr.splitlines()[-1]
    *batch, one, two = done.stdout.split()
    assert batch == ["[0,", "1]"]
    wait_until_gone([int(one), int(two)])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_of_the_process_cannot_take_its_batches_nor_end_its_workers(data):
    with loader(data, workers=1) as found:
        next(found)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                found.close()
                next(found)
            except PackproofError as error:
                code = 0 if "another process" in error.what else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert next(found).step == 1


def test_workers_start_and_work_beside_threads_and_after_a_backward_pass(data):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        weight = torch.ones(400, 400, requires_grad=True)
        (weight @ weight).sum().backward()
        with loader(data, workers=2) as found:
            assert steps(found, 4) == steps(loader(data), 4)
    finally:
        torch.set_num_threads(threads)


class Clock:
    """In place of the loader's: it stands still but for what the test, or rows that it prepares in line, add to it."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("production.training.data.loader.time", made)
    return made


class Gated(PackedData):
    """Prepares no row of a step before the step's gate is opened. For `IN_ORDER`, rank 0 of two: a task for each of two rows."""

    steps = 6

    def __init__(self, data, clock):
        super().__init__(sources=data._sources, tokenizer=load("word"), settings=SETTINGS, guards=GUARDS)
        self.group, self.clock = 1, clock
        self.gates = [os.pipe() for _ in range(self.steps)]

    def open(self, step):
        os.write(self.gates[step][1], b"..")

    def prepare(self, samples):
        os.read(self.gates[samples[0].row // 4][0], 1)
        self.clock.now += 3  # seen where rows are prepared in this process
        return super().prepare(samples)

    def close(self):
        for end in itertools.chain(*self.gates):
            os.close(end)


@pytest.fixture
def gated(data, clock):
    with contextlib.closing(Gated(data, clock)) as made:
        yield made


def passing(found, clock, monkeypatch, *, most=None, then=lambda: None):
    """A list that grows, as a second goes by, with each look of a step that finds nothing ready; from the `most`th look on it sleeps."""
    sleep, looks = found._prefetcher._changed.wait, []

    def wait(timeout):
        clock.now += 1
        looks.append(clock.now)
        if len(looks) == most:
            then()
        return most is None or len(looks) < most or sleep(timeout)

    monkeypatch.setattr(found._prefetcher._changed, "wait", wait)
    return looks


def ready(found):
    """Number and readiness of each step that is under way."""
    return [(step.planned.step, step.is_ready) for step in found._prefetcher._steps]


def test_rows_that_are_prepared_in_line_are_waited_for_as_long_as_they_take(gated, clock):
    with loader(gated, Order(gated.rows, IN_ORDER), workers=0) as found:
        for step in range(3):
            gated.open(step)
            assert next(found).wait_seconds == 6.0  # two rows
            clock.now += 100  # the step itself


@pytest.mark.parametrize("workers", [1, 2])
def test_the_wait_is_measured_where_rows_are_slower_than_a_step(gated, clock, monkeypatch, workers):
    with loader(gated, Order(gated.rows, IN_ORDER), workers=workers, prefetch=3) as found:
        for step in range(4):
            assert (step, True) not in ready(found)
            with monkeypatch.context() as patch:
                looks = passing(found, clock, patch, most=3, then=lambda step=step: gated.open(step))
                prepared = next(found)
            assert prepared.step == step
            assert prepared.wait_seconds == len(looks) >= 3
            clock.now += 100  # the step itself, in which no row was prepared


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_do_not_wait_if_workers_run_ahead(gated, clock, monkeypatch, workers):
    with loader(gated, Order(gated.rows, IN_ORDER), workers=workers, prefetch=3) as found:
        for step in range(3):
            gated.open(step)
        wait_for(lambda: ready(found) == [(0, True), (1, True), (2, True)])  # none of them has been asked for
        with monkeypatch.context() as patch:
            looks = passing(found, clock, patch)
            for step in range(3):
                assert ready(found)[0] == (step, True)
                prepared = next(found)
                assert (prepared.step, prepared.wait_seconds) == (step, 0.0)
                clock.now += 100
            assert not looks
        for step in range(3, 6):  # and ahead again, once rows come faster than steps are taken
            gated.open(step)
        wait_for(lambda: ready(found)[:2] == [(3, True), (4, True)])
        assert next(found).wait_seconds == 0.0


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_no_more_than_prefetch_batches_are_prepared_ahead(data, tmp_path):
    counting = Counting(sources=data._sources, tokenizer=load("word"), settings=SETTINGS, guards=GUARDS)
    counting.log = tmp_path / "log"
    with loader(counting, workers=2, prefetch=3) as found:
        for taken in (1, 2):
            next(found)
            wait_for(lambda taken=taken: counting.log.read_text().count("task") == taken + 3)
            time.sleep(0.1)
            assert counting.log.read_text().count("task") == taken + 3


class Counting(PackedData):
    """Notes each task in a file."""

    def prepare(self, samples):
        with self.log.open("a") as file:
            file.write("task\n")
        return super().prepare(samples)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_r_order_7_a_validation_counts_the_same_tokens_for_every_dp(data, dp):
    builder = RowBuilder(tokenizer=load("word"), settings=SETTINGS)
    whole = collate([builder.build(line(number)["messages"]) for number in range(23)])
    order = ValidationOrder(rows=23, global_batch_size=8, data_parallel_size=dp)
    counted, counts, last = 0.0, RowCounts(), []
    for rank in range(dp):
        with loader(data, order, share=(rank, dp), workers=1 if dp == 2 else 0) as found:
            prepared = list(found)
        assert len(prepared) == 3
        counted += sum(float(count_trained(each.batch)) for each in prepared)
        counts = sum((each.counts for each in prepared), counts)
        last.append(prepared[-1].batch)
    assert counted == float(count_trained(whole)) == counts.trained_tokens
    assert counts.rows == 23
    tail = pad_validation(collate([builder.build(line(number)["messages"]) for number in range(16, 23)]), size=dp)
    for rank, batch in enumerate(last):
        expected = take_rank(tail, rank=rank, size=dp)
        assert torch.equal(batch.input_ids, expected.input_ids)
        assert batch.sample_mask.tolist() == expected.sample_mask.tolist()


def words(chat):
    """Each word one token; the assistant's are trained."""
    tokens = [
        (int(word[1:]), message["role"] == "assistant")
        for message in chat.messages
        for word in message["content"].split()
    ]
    if any(token == 99 for token, _ in tokens):
        raise KeyError("w99")
    return Conversation(
        token_ids=torch.tensor([token for token, _ in tokens], dtype=torch.int64),
        token_mask=torch.tensor([float(is_trained) for _, is_trained in tokens]),
    )


def test_conversations_of_a_whole_global_batch_come_tokenized_in_order_on_every_rank(tmp_path):
    data = ConversationData(sources=[write(tmp_path, map(line, range(9)))], tokenize=words, group=2)
    order = Order(data.rows, IN_ORDER)
    with loader(data, order, share=None, workers=2) as found:
        prepared = next(found)
    expected = [words(Chat(messages=line(number)["messages"])) for number in range(4)]
    assert len(prepared.batch.conversations) == 4
    for ours, theirs in zip(prepared.batch.conversations, expected, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.token_mask, theirs.token_mask)
    assert prepared.batch.sample_mask.tolist() == [1.0] * 4
    assert prepared.counts.rows == 4
    assert prepared.counts.trained_tokens == sum(int(each.token_mask[1:].sum()) for each in expected) > 0


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [("w1 " * 50, "truncated", "got 52"), ("w99", "unexpected", "KeyError: 'w99'")],
)
def test_a_conversation_that_cannot_be_taken_is_named(tmp_path, content, kind, text):
    lines = [line(0), {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "w1 w2"}]}]
    settings = ChatSettings(
        prompt_format="identity", add_bos=False, add_eos=False, max_length=40, on_long_conversation="refuse"
    )
    chat = ChatTokenizer(tokenizer=load("word"), settings=settings)
    given = {"tokenize": words, "tokenize_many": lambda rows: list(map(words, rows))}
    if kind == "truncated":
        given = {"tokenize": lambda each: chat.tokenize([each])[0]}
    data = ConversationData(sources=[write(tmp_path, lines)], **given)
    for workers in (0, 1):
        with (
            loader(data, Order(data.rows, IN_ORDER), share=None, workers=workers) as found,
            pytest.raises(BadRow) as caught,
        ):
            next(found)
        assert (caught.value.kind, caught.value.row, caught.value.line) == (kind, 1, 2)
        assert text in caught.value.what


@pytest.mark.parametrize("workers", [0, 1])
def test_conversations_come_as_the_chat_tokenizer_makes_them(tmp_path, workers):
    settings = ChatSettings(prompt_format="identity", max_length=6)
    tokenize = ChatTokenizer(tokenizer=load("word"), settings=settings).tokenize
    path = tmp_path / "chat.jsonl"
    write(tmp_path, map(line, range(8)), path.name)
    data = ConversationData(
        sources=[open_source(path)],
        tokenize=lambda each: tokenize([each])[0],
        tokenize_many=tokenize,
        group=3,
    )
    read = [open_source(path)[row] for row in range(4)]
    with loader(data, Order(data.rows, IN_ORDER), share=None, workers=workers) as found:
        ours, theirs = next(found).batch.conversations, tokenize(read)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.token_mask, other.token_mask)
        assert one.weight == other.weight == 0.0, "also what is too long crosses from the worker"


def test_an_empty_conversation_is_refused(tmp_path):
    data = ConversationData(
        sources=[write(tmp_path, [{"messages": [{"role": "user", "content": ""}]}])], tokenize=words
    )
    (found,) = data.prepare(Order(data.rows, IN_ORDER).batch_at(0).samples[:1])
    assert found.kind == "empty_conversation"


def test_a_fault_that_nobody_expected_is_named_with_its_row(data):
    (row,) = data.prepare(Order(data.rows, IN_ORDER).batch_at(0).samples[:1])

    def explode(rows):
        if any("w0 w0 w2" in messages[0]["content"] for messages in rows):
            raise MemoryError("no room")
        return [row for _ in rows]

    data._builder.build_group = explode
    data._builder.build = lambda messages: explode([messages])[0]
    found = data.prepare(Order(data.rows, IN_ORDER).batch_at(0).samples)
    assert [isinstance(each, BadRow) for each in found] == [False, False, True, False]
    assert (found[2].kind, found[2].what) == ("unexpected", "MemoryError: no room")
    assert pickle.loads(pickle.dumps(found[2])).row == 2


@pytest.mark.parametrize(
    ("changes", "where"),
    [({"workers": -1}, "workers"), ({"prefetch": 0}, "prefetch"), ({"stuck_seconds": 0}, "stuck_seconds")],
)
def test_settings_that_cannot_be_are_refused(changes, where):
    with pytest.raises(PackproofError) as caught:
        LoaderSettings(**changes)
    assert where in caught.value.where


def test_page_locked_memory_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PackproofError, match="must be false without a CUDA device"):
        LoaderSettings(pin_memory=True)


def test_r_order_8_a_resume_with_other_data_is_refused_with_both_values(data, tmp_path):
    def now(source=data._sources[0], tokenizer="word", rows=SETTINGS, order=SHUFFLED):
        return fingerprint(sources=[source], tokenizer=load(tokenizer), rows=rows, order=order)

    saved = json.loads(json.dumps(now()))
    check_resume(saved, now())
    check_resume(saved, now(order=dataclasses.replace(SHUFFLED, max_epochs=7)))
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    check_resume(saved, now(open_source(copy)))
    others = {
        "files": now(write(tmp_path, map(line, range(22)), "less.jsonl")),
        "tokenizer": now(tokenizer="bos"),
        "semantics": now(
            rows=dataclasses.replace(SETTINGS, semantics=dataclasses.replace(SETTINGS.semantics, exact_fill="stop"))
        ),
        "prompt_format": now(rows=dataclasses.replace(SETTINGS, prompt_format="default")),
        "pad_token": now(rows=dataclasses.replace(SETTINGS, pad_token="<s>")),
        "assistant_prefix_len": now(rows=dataclasses.replace(SETTINGS, assistant_prefix_len=0)),
        "pack_length": now(rows=dataclasses.replace(SETTINGS, pack_length=32)),
        "context_parallel_size": now(rows=dataclasses.replace(SETTINGS, context_parallel_size=2)),
        "data_parallel_size": now(order=dataclasses.replace(SHUFFLED, data_parallel_size=4)),
        "global_batch_size": now(order=dataclasses.replace(SHUFFLED, global_batch_size=8)),
        "order": now(order=dataclasses.replace(SHUFFLED, kind="sequential", seed=None)),
        "last_batch": now(order=dataclasses.replace(SHUFFLED, last_batch="drop")),
        "seed": now(order=dataclasses.replace(SHUFFLED, seed=4)),
        "weights": now(order=dataclasses.replace(SHUFFLED, weights=(1.0,))),
    }
    assert set(others) == set(saved)
    for key, other in others.items():
        with pytest.raises(ResumeRefused) as caught:
            check_resume(saved, other)
        assert caught.value.differing[key] == (saved[key], json.loads(json.dumps(other[key])))
        assert set(caught.value.differing) <= ({key, "seed"} if key == "order" else {key})
        assert f"{key}: saved" in caught.value.what
    with pytest.raises(ResumeRefused, match="not there"):
        check_resume({key: value for key, value in saved.items() if key != "seed"}, now())


def test_r_order_8_a_cyclic_run_of_another_length_or_of_an_older_meaning_is_refused(data):
    cyclic = dataclasses.replace(SHUFFLED, kind="megatron-cyclic", seed=None, run_steps=5)
    given = {"sources": data._sources, "tokenizer": load("word"), "rows": SETTINGS}
    saved = fingerprint(**given, order=cyclic)
    check_resume(saved, fingerprint(**given, order=cyclic))
    longer = fingerprint(**given, order=dataclasses.replace(cyclic, run_steps=6))
    for before in (saved, {key: value for key, value in saved.items() if key != "run_steps"}):
        with pytest.raises(ResumeRefused, match="permutes the samples of all its steps") as caught:
            check_resume(before, longer)
        assert set(caught.value.differing) == {"run_steps"}


def test_a_tokenizers_identity_does_not_depend_on_its_last_call(tmp_path):
    one, other = load("word"), load("bos")
    before = tokenizer_identity(one)
    one(["w1", "w2 w3"], padding=True, truncation=True, max_length=1)
    assert tokenizer_identity(one) == before != tokenizer_identity(other)
    one.save_pretrained(tmp_path / "saved")
    loaded = type(one).from_pretrained(tmp_path / "saved")
    assert tokenizer_identity(loaded) == before
    loaded.chat_template = "{{ messages }}"
    assert tokenizer_identity(loaded) != before
