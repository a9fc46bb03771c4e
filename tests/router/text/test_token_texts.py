"""A text sought in all tokens at once is found where a look at each token finds it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from millrace_router.text.token_texts import SEPARATOR, TokenTexts

TEXTS = st.text("ab\n🙂", max_size=4)


@given(texts=st.lists(TEXTS, max_size=8), part=st.text("ab\n🙂", min_size=1, max_size=3))
@example(texts=["ab", "ba", "", "aa"], part="a")
@example(texts=["a", "b"], part="ab")
def test_each_token_with_the_part_is_found_once(texts: list[str], part: str) -> None:
    found = list(TokenTexts(texts).having(part))
    assert found == [index for index, text in enumerate(texts) if part in text]


def test_no_part_reaches_over_two_tokens() -> None:
    assert not list(TokenTexts(["a", "b"]).having(f"a{SEPARATOR}b"))
