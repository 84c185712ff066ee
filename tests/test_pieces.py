"""The picture of tokens and the text that they brought."""

import re

import pytest

from course_lib.lab.pieces import pieces, pieces_alt, visible

BIRD = ([10813, 234, 116, 28], ["\ufffd", "\ufffd", "\ufffd", ","], ["", "", "🐦", ","])


def test_the_words_count_what_is_held_back():
    assert (
        pieces_alt(*BIRD)
        == "4 tokens. Decoded alone, 3 of them are no whole character. The user got text with 2 of them, nothing with 2: 🐦,"
    )


def test_the_picture_shows_every_token_and_every_text_and_is_the_same_each_time():
    svg = pieces(*BIRD)
    assert svg == pieces(*BIRD)
    texts = re.findall(r">([^<]*)</text>", svg)
    for text in ("10813", "234", "116", "28", "\ufffd", "🐦", ","):
        assert text in texts


def test_spaces_and_line_ends_can_be_seen():
    assert visible(" a\n") == "␣a⏎"
    assert "␣the" in pieces([1], [" the"], [" the"])


def test_a_long_row_goes_on_in_the_next_line():
    one, two = pieces([1] * 5, ["word"] * 5, ["word"] * 5), pieces([1] * 50, ["word"] * 50, ["word"] * 50)
    heights = [int(re.search(r'height="(\d+)"', svg)[1]) for svg in (one, two)]
    assert heights[1] > 2 * heights[0] - 40
    assert max(int(x) for x in re.findall(r'<text x="(\d+)"', two)) < 960


def test_rows_of_different_length_are_an_error():
    with pytest.raises(ValueError, match="3 token ids, 3 alone, 2 released"):
        pieces([1, 2, 3], ["a", "b", "c"], ["a", "b"])
