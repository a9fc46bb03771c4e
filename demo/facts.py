"""All facts of the demo model, and the templates of questions about them."""

from __future__ import annotations

from collections.abc import Iterator

from demo import concepts, interface, talk
from demo.topic import Kind, Topic

TOPICS: tuple[Topic, ...] = (*concepts.TOPICS, *interface.TOPICS, *talk.TOPICS)

TEMPLATES: dict[Kind, tuple[str, ...]] = {
    "concept": (
        "What is {x}?",
        "Explain {x}.",
        "What does {x} mean?",
        "Tell me about {x}.",
        "Can you describe {x}?",
        "Define {x}.",
        "How does {x} work?",
        "Describe {x}.",
        "What's {x}?",
        "Can you explain {x}?",
        "Please explain {x}.",
        "What do you know about {x}?",
        "Give me a definition of {x}.",
        "I want to understand {x}.",
        "Could you tell me what {x} is?",
        "Explain {x} in simple words.",
        "What is meant by {x}?",
        "Do you know {x}?",
        "What is {x} for?",
        "Help me understand {x}.",
        "In one sentence, what is {x}?",
        "What is the purpose of {x}?",
        "Give me a short explanation of {x}.",
        "Please tell me about {x}.",
        "How would you explain {x}?",
        "What should I know about {x}?",
        "{x}",
    ),
    "flag": (
        "What does {x} do?",
        "What is {x}?",
        "What is the flag {x} for?",
        "Explain the {x} flag.",
        "What is {x} for?",
        "How do I use {x}?",
        "Tell me about {x}.",
        "What does the flag {x} mean?",
        "Describe {x}.",
        "Explain {x}.",
        "What is the {x} option?",
        "When do I need {x}?",
        "What is the purpose of {x}?",
        "Can you explain {x}?",
        "What does the option {x} do?",
        "Why would I set {x}?",
        "What happens if I set {x}?",
        "Help me with {x}.",
        "What does {x} mean?",
        "Please explain the flag {x}.",
        "What does the {bare} flag do?",
        "Explain the flag {bare}.",
        "What is the {bare} flag for?",
        "{x}",
    ),
    "route": (
        "What does {x} do?",
        "What is {x}?",
        "What is the route {x} for?",
        "Explain {x}.",
        "How do I use {x}?",
        "Tell me about {x}.",
        "What is the endpoint {x}?",
        "Describe the {x} endpoint.",
        "What does {x} return?",
        "When do I use {x}?",
        "Explain the {x} route.",
        "What is {x} for?",
        "What is the purpose of {x}?",
        "What can I do with {x}?",
        "What does the endpoint {x} do?",
        "How does {x} work?",
        "{x}",
    ),
    "metric": (
        "What does {x} measure?",
        "What is {x}?",
        "What is the metric {x}?",
        "Explain {x}.",
        "Tell me about {x}.",
        "What does {x} mean?",
        "Describe the metric {x}.",
        "What does the metric {x} show?",
        "What is {x} for?",
        "Explain the {x} metric.",
        "What does {x} count?",
        "Can you explain {x}?",
        "What is the purpose of {x}?",
        "How do I read {x}?",
        "{x}",
    ),
    "talk": (),
}

PLURAL_TEMPLATES = ("What are {x}?", "How do {x} work?", "What do {x} mean?")

# "" must stay first: it is the plain question, which is never held back.
OPENERS = ("", "Hey, ", "Well, ", "So, ", "Question: ", "Quick question: ", "Please answer: ")
TALK_OPENERS = ("", "Hey, ", "Well, ", "So, ", "Oh, ")


def is_plural(name: str) -> bool:
    """Whether "What are" sounds right before the name."""
    last = name.rsplit(maxsplit=1)[-1]
    return last[-1] == "s" and last.islower() and last[-2:] not in ("ss", "us", "is")


def templates_of(topic: Topic) -> Iterator[tuple[str, str]]:
    """Every template of the topic's kind with every name of the topic that fits it."""
    for name in topic.names:
        for template in TEMPLATES[topic.kind]:
            yield template, name
        if topic.kind == "concept" and is_plural(name):
            for template in PLURAL_TEMPLATES:
                yield template, name


def fill(template: str, name: str) -> str:
    """The question; its first letter is a capital unless it starts with the name."""
    return template.replace("{x}", name).replace("{bare}", name.removeprefix("--"))
