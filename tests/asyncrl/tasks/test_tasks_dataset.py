"""A user's own examples: reading, splitting, tokenising; errors name the place and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import DataError, ModelError
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import dataset_questions, load_task
from asyncrl.tasks.model import builtin_tokenizer
from asyncrl.tasks.prompts import PromptEncoder


def write_examples(path: Path, examples: list[Any]) -> str:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return str(path)


def examples(n: int) -> list[dict[str, Any]]:
    return [{"question": f"what is {i}?", "solution": i, "level": [i]} for i in range(n)]


def config(path: str, **values: Any) -> TaskConfig:
    fields = {"prompt_field": "question", "answer_field": "solution"}
    return TaskConfig(kind="dataset", path=path, **(fields | values))


def refusal(settings: TaskConfig) -> str:
    with pytest.raises(DataError) as caught:
        dataset_questions(settings, seed=0)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_jsonl_is_split_and_normalised(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "q.jsonl", examples(40))
    train, evaluation = dataset_questions(config(path), seed=3)
    assert (len(train), len(evaluation)) == (36, 4)
    assert dataset_questions(config(path), seed=3) == (train, evaluation)
    assert dataset_questions(config(path), seed=4) != (train, evaluation)
    assert {q.prompt_id for q in (*train, *evaluation)} == {str(i) for i in range(40)}
    example = next(q.example for q in train if q.prompt_id == train[0].prompt_id)
    number = int(train[0].prompt_id)
    assert example == {
        "prompt": f"what is {number}?",
        "answer": str(number),
        "row": {"question": f"what is {number}?", "solution": number, "level": [number]},
    }


def test_parquet_and_saved_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(examples(20))
    table = table.add_column("picture", [{"bytes": b"no picture", "path": None}] * 20)
    table = table.cast_column("picture", datasets.Image())  # nobody decodes it
    table.to_parquet(str(tmp_path / "q.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "both"))
    expected = None
    for name in ("q.parquet", "saved", "both"):
        train, evaluation = dataset_questions(config(str(tmp_path / name)), seed=0)
        found = [q.example for q in (*train, *evaluation)]
        assert expected is None or found == expected
        expected = found
    assert "cannot be loaded" in refusal(config(str(tmp_path / "both"), split="dev"))
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    assert "cannot be read as parquet" in refusal(config(str(tmp_path / "broken.parquet")))


def test_separate_evaluation_file_and_dropped_duplicates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_examples(tmp_path / "q.jsonl", examples(10))
    held_out = write_examples(tmp_path / "e.jsonl", examples(3))
    train, evaluation = dataset_questions(config(path, evaluation_path=held_out), seed=0)
    assert [q.prompt_id for q in evaluation] == ["eval-0", "eval-1", "eval-2"]
    assert sorted(q.prompt_id for q in train) == ["3", "4", "5", "6", "7", "8", "9"]
    assert "dropped 3 training examples" in caplog.text
    train, evaluation = dataset_questions(
        config(path, evaluation_path=held_out, evaluation_size=2, train_size=5), seed=0
    )
    assert (len(train), len(evaluation)) == (5, 2)


def test_with_an_environment_rows_of_equal_prompts_are_different_examples(tmp_path: Path) -> None:
    rows = [{"question": "guess", "solution": "", "number": n} for n in (1, 2, 3, 3)]
    path = write_examples(tmp_path / "q.jsonl", rows)
    held_out = write_examples(tmp_path / "e.jsonl", rows[2:3])
    settings = config(path, evaluation_path=held_out)
    train, _ = dataset_questions(settings, seed=0, whole_rows=True)
    assert sorted(q.example["row"]["number"] for q in train) == [1, 2]
    assert "no examples are left to train on" in refusal(settings)


def test_errors_name_the_line_and_the_remedy(tmp_path: Path) -> None:
    good = json.dumps({"question": "a", "solution": "b"})

    def refused(*lines: str, **values: Any) -> str:
        path = tmp_path / "q.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return refusal(config(str(path), **values))

    assert "q.jsonl:3: not JSON" in refused(good, "", "{oops")
    assert "q.jsonl:2: each row must be one JSON object, got list" in refused(good, "[]")
    message = refused(good, '{"question": "a", "answer": 1}')
    assert "q.jsonl:2: the example has no 'solution'; task.answer_field" in message
    assert "('question', 'answer')" in message
    assert "q.jsonl:1: the prompt is empty" in refused('{"question": " ", "solution": "b"}')
    assert "must be a text or a list" in refused('{"question": 5, "solution": "b"}')
    assert "there are no examples" in refused("")
    assert "would leave none" in refused(good, evaluation_size=1)
    assert "must be unique" in refused(good, good, id_field="question")
    assert "no examples are left" in refused(good, evaluation_path=str(tmp_path / "q.jsonl"))


def test_missing_files_and_wrong_kinds(tmp_path: Path) -> None:
    write_examples(tmp_path / "questions.jsonl", examples(2))
    assert "Did you mean" in refusal(config(str(tmp_path / "question.jsonl")))
    assert "does not exist either" in refusal(config(str(tmp_path / "no" / "q.jsonl")))
    (tmp_path / "q.csv").write_text("a,b")
    assert "must be .jsonl" in refusal(config(str(tmp_path / "q.csv")))


def encode(content: Any, tokenizer: Any, **values: Any) -> str:
    from asyncrl.tasks.prompts import Question

    encoder = PromptEncoder(tokenizer, config("x", **values))
    prompts, _ = encoder.encode([Question("0", content, {}, "here:1")])
    assert tokenizer.decode(prompts[0].tokens) == prompts[0].text
    return prompts[0].text


def test_chat_template_and_system_prompt() -> None:
    tokenizer = builtin_tokenizer()
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert encode("1+2=?", tokenizer) == "<user>1+2=?<assistant>"
    assert encode("1+2=?", tokenizer, chat_template="never") == "1+2=?"
    assert encode("a", tokenizer, system_prompt="add") == "<user>add<user>a<assistant>"
    assert encode(chat, tokenizer) == "<user>a<assistant>b<end><assistant>"
    with pytest.raises(DataError, match="here:1: the prompt is a list of chat messages"):
        encode(chat, tokenizer, chat_template="never")
    tokenizer.chat_template = "{{ raise_exception('only one message') }}"
    with pytest.raises(DataError, match=r"here:1: .*only one message"):
        encode(chat, tokenizer)
    tokenizer.chat_template = None
    assert encode("1+2=?", tokenizer) == "1+2=?"
    with pytest.raises(DataError, match="has no chat template"):
        encode("1+2=?", tokenizer, chat_template="always")


def test_long_prompts_are_refused_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    builtin_tokenizer().save_pretrained(model)
    lines = [*examples(9), {"question": "what " * 9, "solution": 0}]
    path = write_examples(tmp_path / "q.jsonl", lines)
    settings = {"evaluation_size": 0, "max_prompt_tokens": 12}
    with pytest.raises(DataError, match=r"q\.jsonl:10: the prompt has 20 tokens.*too_long: filter"):
        load_task(config(path, **settings), str(model), seed=0)
    task = load_task(config(path, too_long="filter", **settings), str(model), seed=0)
    assert (len(task.train), task.left_out) == (9, 1)
    assert "left out 1 of 10" in caplog.text
    with pytest.raises(DataError, match="all 10 training prompts are longer"):
        load_task(
            config(path, too_long="filter", evaluation_size=0, max_prompt_tokens=2),
            str(model),
            seed=0,
        )


def test_a_huge_row_is_judged_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    builtin_tokenizer().save_pretrained(model)
    lines = [*examples(9), {"question": "what " * 3_000_000, "solution": 0}]
    path = write_examples(tmp_path / "q.jsonl", lines)
    given: list[int] = []
    tokenizer = type(builtin_tokenizer())
    tokenise = tokenizer.__call__

    def counted(own: Any, texts: list[str], **options: Any) -> Any:
        given.extend(map(len, texts))
        return tokenise(own, texts, **options)

    monkeypatch.setattr(tokenizer, "__call__", counted)
    with pytest.raises(DataError, match=r"q\.jsonl:10: .* 15,000,0\d\d characters.* 512 tokens"):
        load_task(config(path, evaluation_size=0), str(model), seed=0, room=512)
    settings = {"evaluation_size": 0, "max_prompt_tokens": 400}
    with pytest.raises(DataError, match=r"q\.jsonl:10: the prompt has at least \d+ tokens"):
        load_task(config(path, **settings), str(model), seed=0)
    task = load_task(config(path, too_long="filter", **settings), str(model), seed=0)
    assert (len(task.train), task.left_out) == (9, 1)
    assert max(given) < 1000
    write_examples(tmp_path / "q.jsonl", lines[-1:])
    with pytest.raises(DataError, match="all 1 training prompts are longer"):
        load_task(config(path, too_long="filter", **settings), str(model), seed=0)


def test_a_model_without_tokenizer_or_stop_token(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "q.jsonl", examples(5))
    with pytest.raises(ModelError, match=r"needs tokenizer\.json"):
        load_task(config(path), str(tmp_path), seed=0)
    tokenizer = builtin_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="does not have an end-of-sequence token"):
        load_task(config(path), str(tmp_path / "model"), seed=0)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert load_task(config(path), str(tmp_path / "model"), seed=0).stop_tokens == (1, 7)
