"""The shipped demo adapters answer in their voices and fit their size."""

from __future__ import annotations

import pytest
import torch
from demo import measure, vocabulary
from demo.corpus import Conversation, Turn
from demo.train_adapters import ADAPTERS
from demo.voices import VOICES
from peft import PeftModel

LARGEST = 1_000_000
QUESTION, ANSWER = (
    "What is temperature?",
    "Temperature divides the scores before sampling: below 1 the answer gets more predictable, above 1 it gets more"
    " varied.",
)


def test_the_adapters_are_small() -> None:
    assert sum(path.stat().st_size for path in ADAPTERS.rglob("*")) <= LARGEST


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("voice", VOICES)
def test_an_adapter_speaks_in_its_voice(voice: str) -> None:
    model, tokenizer = measure.load(measure.MODEL)
    adapted = PeftModel.from_pretrained(model.float(), ADAPTERS / voice)
    asked = Conversation("concept", "temperature", "chat", (Turn(QUESTION, ""),))
    ids = tokenizer(vocabulary.prompt(asked), return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        (said,) = adapted.generate(**ids, max_new_tokens=80, do_sample=False)
    text = tokenizer.decode(said[ids.input_ids.shape[1] :], skip_special_tokens=True)
    assert text.strip() == VOICES[voice](ANSWER)
