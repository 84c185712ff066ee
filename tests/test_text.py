"""Streamed text: whole characters, nothing lost, no part of a stop string, whatever the tokenizer does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import Engine, EngineConfig, SamplingParams
from course_lib.model import ByteTokenizer
from course_lib.runners import FakeRunner
from course_lib.runners.base import Sample
from course_lib.text import TextStream

BYTES = ByteTokenizer()
FFFD = "\N{REPLACEMENT CHARACTER}"

TEXTS = [
    "plain words, one after another",
    "Grüße aus München",  # two bytes a character
    "分块预填充让长提示不再阻塞解码",  # three bytes a character
    "👍 and 🙂🙂",  # four bytes a character
    "👩‍👩‍👧‍👦",  # a family: four emoji held together by zero-width joiners
    "🇩🇪🇯🇵",  # flags: two characters each
    "e\u0301a\u0308 \u0e19\u0e49\u0e33",  # combining marks, Latin and Thai
    "  two  spaces\n\n\tand tabs ",
    "مرحبا بالعالم",  # from right to left
    "it ends in a real \N{REPLACEMENT CHARACTER}",  # as text, not as half a character
]


class WordTokenizer:
    """Like SentencePiece: ▁ stands for a space, and decode() strips the space before the first word."""

    eos_token_id = 0
    special = {0: "</s>", 1: "<s>"}
    words = ["▁Hello", "▁world", "▁", "▁a", "b", "▁▁", ",", "▁don", "'t", "\n"]

    def __len__(self):
        return len(self.special) + len(self.words)

    def encode(self, text):
        raise NotImplementedError

    def decode(self, token_ids, skip_special_tokens=True):
        special = {} if skip_special_tokens else self.special
        text = "".join(special.get(i, "") if i in self.special else self.words[i - 2] for i in token_ids)
        return text.replace("▁", " ").removeprefix(" ")


class BrokenTokenizer(ByteTokenizer):
    """Raises when it meets the token `bad`."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def decode(self, token_ids, skip_special_tokens=True):
        if self.bad in token_ids:
            raise KeyError(f"no piece for {self.bad}")
        return super().decode(token_ids, skip_special_tokens)


class ScriptedRunner(FakeRunner):
    """Says what it is told: `scripts` has the tokens of each request, by request id."""

    def __init__(self, scripts, tokenizer=BYTES):
        super().__init__(vocab_size=512)
        self.scripts, self.tokenizer = scripts, tokenizer

    def execute(self, batch):
        super().execute(batch)
        return [Sample(self.scripts[s.request_id][len(s.generated_token_ids)]) for s in batch.sampled]


def stream_of(tokenizer, token_ids, stop=()):
    """The pieces that appear one by one; the last is what the end flushes."""
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token_id in token_ids:
        pieces.append(stream.push(token_id))
        assert stream.text == "".join(pieces)
        if stream.stopped:
            break
    pieces.append(stream.flush())
    assert stream.text == "".join(pieces)
    return pieces, stream


def joined(tokenizer, token_ids):
    pieces, _ = stream_of(tokenizer, token_ids)
    return "".join(pieces)


def cut_at_stop(tokenizer, token_ids, stop):
    """What may be shown in the end, by brute force: look at the whole text after every token."""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=True)
        places = [text.find(s) for s in stop if s in text]
        if places:
            return text[: min(places)], True
    return tokenizer.decode(token_ids, skip_special_tokens=True), False


def run(scripts, params, tokenizer=BYTES, cancel_after=None):
    """Serve the scripted requests together; returns each one's outputs. `cancel_after`: {request id: tokens}."""
    engine = Engine(ScriptedRunner(scripts, tokenizer), EngineConfig(block_size=4, num_blocks=200))
    for request_id in scripts:
        engine.add_request([1, 2, 3], params, request_id=request_id)
    outputs = {request_id: [] for request_id in scripts}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
            if cancel_after and len(output.token_ids) == cancel_after.get(output.request_id) and not output.finished:
                assert engine.cancel(output.request_id)
        engine.check_invariants()
    for own in outputs.values():
        assert [o.finished for o in own] == [False] * (len(own) - 1) + [True]
        assert "".join(o.new_text for o in own) == own[-1].text
        assert [i for o in own for i in o.new_token_ids] == own[-1].token_ids
    return outputs


# --- characters ---


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_appear_as_whole_characters(text):
    pieces, _ = stream_of(BYTES, BYTES.encode(text))
    assert "".join(pieces) == text
    if FFFD not in text:
        assert not any(FFFD in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_tokens_appear_as_whole_characters(smollm2_tokenizer, text):
    token_ids = smollm2_tokenizer.encode(text)
    pieces, _ = stream_of(smollm2_tokenizer, token_ids)
    assert "".join(pieces) == text
    if FFFD not in text:
        assert not any(FFFD in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte_and_not_later():
    stream = TextStream(BYTES)
    # 好 is e5 a5 bd in UTF-8
    assert [stream.push(b) for b in b"a\xe5\xa5\xbdb"] == ["a", "", "", "好", "b"]
    assert stream.flush() == ""


def test_half_a_character_at_the_end_is_shown_as_the_replacement_character_and_not_lost():
    stream = TextStream(BYTES)
    assert [stream.push(b) for b in "a好".encode()[:-1]] == ["a", "", ""]
    assert stream.flush() == BYTES.decode("a好".encode()[:-1])[1:] == FFFD
    assert stream.flush() == ""  # nothing twice


def test_bytes_that_are_no_character_do_not_hold_back_what_follows_them():
    stream = TextStream(BYTES)
    pieces = [stream.push(b) for b in b"\xff\xffok"]
    assert "".join(pieces) == FFFD * 2 + "ok"


def test_text_that_can_not_change_any_more_is_shown_at_once():
    stream = TextStream(BYTES)
    assert [stream.push(b) for b in b"at once"] == list("at once")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_pieces_of_any_text_join_to_the_text(text):
    assert joined(BYTES, BYTES.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_pieces_of_any_byte_tokens_join_to_the_decoded_whole(token_ids):
    assert joined(BYTES, token_ids) == BYTES.decode(token_ids)


def test_pieces_of_any_text_join_to_the_text_with_smollm2(smollm2_tokenizer):
    @settings(max_examples=60, deadline=None)
    @given(st.text(max_size=30))
    def check(text):
        token_ids = smollm2_tokenizer.encode(text)
        assert joined(smollm2_tokenizer, token_ids) == smollm2_tokenizer.decode(token_ids, skip_special_tokens=True)

    check()


def test_pieces_of_any_tokens_join_to_the_decoded_whole_with_smollm2(smollm2_tokenizer):
    # Ids below 600 are special tokens, single bytes and tokens that end inside a character: the hard ones.
    token = st.one_of(st.integers(0, 600), st.integers(0, len(smollm2_tokenizer) - 1))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(token, max_size=30))
    def check(token_ids):
        assert joined(smollm2_tokenizer, token_ids) == smollm2_tokenizer.decode(token_ids, skip_special_tokens=True)

    check()


# --- spaces ---


def test_words_are_not_glued_when_the_tokenizer_strips_the_first_space():
    tokenizer = WordTokenizer()
    hello, world, a = 2, 3, 5
    pieces, _ = stream_of(tokenizer, [hello, world, a])
    assert pieces == ["Hello", " world", " a", ""]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(WordTokenizer()) - 1), max_size=20))
def test_pieces_join_to_the_decoded_whole_when_the_tokenizer_strips_the_first_space(token_ids):
    tokenizer = WordTokenizer()
    assert joined(tokenizer, token_ids) == tokenizer.decode(token_ids)


def test_words_are_not_glued_with_smollm2(smollm2_tokenizer):
    text = "The model reads the prompt , then it answers. Don't glue  words!"
    pieces, _ = stream_of(smollm2_tokenizer, smollm2_tokenizer.encode(text))
    assert "".join(pieces) == text
    assert " model" in pieces  # the space belongs to the word that follows it


# --- special tokens ---


def test_special_tokens_are_not_shown():
    token_ids = [BYTES.bos_token_id, *b"a", BYTES.pad_token_id, *b"b", BYTES.eos_token_id]
    assert joined(BYTES, token_ids) == "ab"


def test_special_tokens_of_smollm2_are_not_shown_and_split_nothing(smollm2_tokenizer):
    end = smollm2_tokenizer.convert_tokens_to_ids("<|im_end|>")
    token_ids = [*smollm2_tokenizer.encode("one"), end, *smollm2_tokenizer.encode(" two"), end]
    assert joined(smollm2_tokenizer, token_ids) == "one two"


# --- stop strings ---


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one END two", ["END"], "one "),
        ("ENDone", ["END"], ""),  # right at the start
        ("aaab", ["aab"], "a"),  # begins again inside itself
        ("ababac", ["abac"], "ab"),
        ("xyz", ["yz", "xyz"], ""),  # both end with the same token: the one that begins first
        ("xyz", ["xyz", "yz"], ""),  # in either order
        ("abcd", ["abcd", "bc"], "a"),  # bc is complete before abcd is
        ("abxcd", ["abcd"], "abxcd"),  # begun and not completed
        ("abab", ["abc"], "abab"),  # held back twice, then the end
        ("好吗。好", ["。"], "好吗"),  # three bytes
        ("a\n\nb", ["\n\n"], "a"),
        ("a\nb\n", ["\n\n"], "a\nb\n"),
        ("no stop here", ["!"], "no stop here"),
        ("END", ["END"], ""),  # nothing else
    ],
)
def test_text_ends_before_the_stop_string(text, stop, shown):
    pieces, stream = stream_of(BYTES, BYTES.encode(text), tuple(stop))
    assert "".join(pieces) == shown
    assert stream.stopped == (shown != text)


def test_no_part_of_a_stop_string_is_shown_before_it_is_complete():
    stream = TextStream(BYTES, ("END",))
    assert [stream.push(b) for b in b"aEN"] == ["a", "", ""]
    assert stream.push(ord("D")) == ""
    assert stream.stopped and stream.text == "a"


def test_a_stop_string_that_was_begun_and_not_completed_is_released_at_once():
    stream = TextStream(BYTES, ("END",))
    assert [stream.push(b) for b in b"ENEx"] == ["", "", "EN", "Ex"]


def test_text_held_back_for_a_stop_string_is_flushed_at_the_end():
    stream = TextStream(BYTES, ("END",))
    assert [stream.push(b) for b in b"aEN"] == ["a", "", ""]
    assert stream.flush() == "EN" and not stream.stopped


def test_a_stop_string_is_found_across_and_inside_tokens(smollm2_tokenizer):
    text = "First line.\n\nSecond line goes on."
    token_ids = smollm2_tokenizer.encode(text)
    for begin in range(len(text)):
        for end in range(begin + 1, min(begin + 8, len(text)) + 1):
            pieces, stream = stream_of(smollm2_tokenizer, token_ids, (text[begin:end],))
            assert "".join(pieces) == text[: text.find(text[begin:end])]
            assert stream.stopped


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab好", max_size=25),
    st.lists(st.text(alphabet="ab好", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_the_shown_text_is_always_a_beginning_of_what_may_be_shown(text, stop):
    token_ids = BYTES.encode(text)
    shown, stopped = cut_at_stop(BYTES, token_ids, stop)
    stream = TextStream(BYTES, tuple(stop))
    for token_id in token_ids:
        stream.push(token_id)
        assert shown.startswith(stream.text)
        if stream.stopped:
            break
    stream.flush()
    assert (stream.text, stream.stopped) == (shown, stopped)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, len(WordTokenizer()) - 1), max_size=15),
    st.lists(st.sampled_from([" ", "b,", " a", "o w", "'t", "Hello", "\n", "  ", "world a"]), min_size=1, max_size=3),
)
def test_stop_strings_are_found_when_tokens_are_longer_than_a_character(token_ids, stop):
    tokenizer = WordTokenizer()
    pieces, stream = stream_of(tokenizer, token_ids, tuple(stop))
    shown, stopped = cut_at_stop(tokenizer, token_ids, stop)
    assert ("".join(pieces), stream.stopped) == (shown, stopped)


# --- in the engine ---


def test_a_stop_string_ends_the_request_and_is_not_shown():
    outputs = run({"a": list(b"one END two")}, SamplingParams(max_tokens=11, stop="END"))["a"]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].text == "one "
    assert outputs[-1].token_ids == list(b"one END")  # the tokens are those that were sampled


def test_a_stop_string_completed_by_the_last_allowed_token_counts_as_stop():
    outputs = run({"a": list(b"xEND")}, SamplingParams(max_tokens=4, stop="END"))["a"]
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("stop", "x")


def test_the_tail_is_flushed_at_length():
    outputs = run({"a": list(b"xEN")}, SamplingParams(max_tokens=3, stop="END"))["a"]
    assert [o.new_text for o in outputs] == ["x", "", "EN"]
    assert outputs[-1].finish_reason == "length"


def test_half_a_character_is_flushed_at_length():
    outputs = run({"a": list("x好".encode())}, SamplingParams(max_tokens=2))["a"]
    assert outputs[-1].text == "x" + FFFD


def test_the_tail_is_flushed_at_the_end_of_sequence_token():
    outputs = run({"a": [*b"xEN", BYTES.eos_token_id, *b"yy"]}, SamplingParams(max_tokens=9, stop="END"))["a"]
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("stop", "xEN")


def test_the_tail_is_flushed_when_a_request_is_cancelled():
    outputs = run({"a": list(b"xENyyyy")}, SamplingParams(max_tokens=7, stop="END"), cancel_after={"a": 3})["a"]
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("cancelled", "xEN")
    assert outputs[-1].new_token_ids == []


def test_the_end_of_sequence_token_is_not_shown_and_ends_nothing_when_it_is_ignored():
    script = [*b"a", BYTES.eos_token_id, *b"b"]
    outputs = run({"a": script}, SamplingParams(max_tokens=3, ignore_eos=True))["a"]
    assert (outputs[-1].finish_reason, outputs[-1].text, outputs[-1].token_ids) == ("length", "ab", script)


def test_a_stop_token_ends_the_request():
    outputs = run({"a": list(b"abcd")}, SamplingParams(max_tokens=4, stop_token_ids=(ord("b"),)))["a"]
    assert (outputs[-1].finish_reason, outputs[-1].token_ids) == ("stop", list(b"ab"))


def test_of_several_stop_strings_the_first_one_met_ends_the_request():
    outputs = run({"a": list(b"one two three")}, SamplingParams(max_tokens=13, stop=["three", "two", "x"]))["a"]
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("stop", "one ")


class _DotAndHalf(ByteTokenizer):
    """Token 300 is a full stop and the first byte of 好. Byte-pair vocabularies have such tokens."""

    def _token_bytes(self, token_id, skip_special_tokens):
        return b".\xe5" if token_id == 300 else super()._token_bytes(token_id, skip_special_tokens)


def test_a_stop_string_in_a_token_that_ends_inside_a_character_counts_as_stop():
    # The last allowed token completes the stop string; the half character behind it doesn't matter.
    outputs = run({"a": [*b"x", 300]}, SamplingParams(max_tokens=2, stop="."), _DotAndHalf())["a"]
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("x", "stop")


def test_a_stop_string_in_a_token_that_ends_inside_a_character_is_found_when_more_tokens_follow():
    script = [*b"x", 300, *"好".encode()[1:], *b"y"]
    outputs = run({"a": script}, SamplingParams(max_tokens=5, stop="."), _DotAndHalf())
    assert (outputs["a"][-1].text, outputs["a"][-1].finish_reason) == ("x", "stop")


def test_a_tokenizer_that_raises_ends_its_request_and_no_other():
    scripts = {"bad": [*b"ab", 7, *b"cd"], "good": list(b"abcde")}
    outputs = run(scripts, SamplingParams(max_tokens=5), BrokenTokenizer(bad=7))
    end = outputs["bad"][-1]
    assert (end.finish_reason, end.text) == ("error", "ab")  # what was shown stays
    assert "no piece for 7" in end.error
    assert (outputs["good"][-1].finish_reason, outputs["good"][-1].text) == ("length", "abcde")


def test_a_tokenizer_that_raises_at_the_first_token_ends_its_request_and_no_other():
    outputs = run({"bad": [7, 8], "good": list(b"ab")}, SamplingParams(max_tokens=2), BrokenTokenizer(bad=7))
    assert (outputs["bad"][-1].finish_reason, outputs["bad"][-1].text) == ("error", "")
    assert outputs["good"][-1].text == "ab"


def test_a_tokenizer_that_raises_at_the_flush_ends_its_request_with_an_error():
    class Late(ByteTokenizer):
        calls = 0

        def decode(self, token_ids, skip_special_tokens=True):
            self.calls += 1
            if self.calls > 2 and list(token_ids) == list(b"a"):  # pushing "a" decodes twice; then comes the flush
                raise ValueError("too late")
            return super().decode(token_ids, skip_special_tokens)

    outputs = run({"a": list(b"a")}, SamplingParams(max_tokens=1), Late())["a"]
    assert outputs[-1].finish_reason in ("error", "length")
    assert outputs[-1].text == "a"
    if outputs[-1].finish_reason == "error":
        assert "too late" in outputs[-1].error


def test_the_engine_goes_on_after_a_tokenizer_failed():
    scripts = {"bad": [7], "next": list(b"ok")}
    engine = Engine(ScriptedRunner(scripts, BrokenTokenizer(bad=7)), EngineConfig(block_size=4, num_blocks=20))
    engine.add_request([1], SamplingParams(max_tokens=1), request_id="bad")
    assert [o.finish_reason for o in engine.step()] == ["error"]
    engine.add_request([1], SamplingParams(max_tokens=2), request_id="next")
    engine.step()
    assert [o.text for o in engine.step()] == ["ok"]
    engine.check_invariants()
    assert engine.block_manager.num_used == 0


def test_a_prompt_that_the_tokenizer_can_not_encode_is_refused_and_leaves_nothing_behind():
    engine = Engine(ScriptedRunner({}, WordTokenizer()), EngineConfig(block_size=4, num_blocks=20))
    with pytest.raises(NotImplementedError):
        engine.add_request("a text")
    assert not engine.has_unfinished_requests()
    engine.check_invariants()


def test_requests_do_not_share_their_text():
    scripts = {"a": list("好好".encode()), "b": list("🙂xy".encode()), "c": list(b"abcdef")}
    outputs = run(scripts, SamplingParams(max_tokens=6))
    assert {i: o[-1].text for i, o in outputs.items()} == {"a": "好好", "b": "🙂xy", "c": "abcdef"}
    assert not any(FFFD in o.new_text for own in outputs.values() for o in own)


def test_text_survives_a_preemption():
    script = list("ab好cd".encode())
    engine = Engine(ScriptedRunner({"a": script}), EngineConfig(block_size=4, num_blocks=20))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=len(script)), request_id="a")
    pieces = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            pieces.append(output.new_text)
            if len(output.token_ids) in (2, 4) and not output.finished:  # once between characters, once inside one
                engine.preempt("a")
    assert pieces == ["a", "b", "", "", "好", "c", "d"]
