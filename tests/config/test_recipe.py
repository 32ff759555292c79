"""What a recipe allows."""

import pytest

from sferic.config import ConfigError, OptimizerConfig, PretrainStage, TokenizerConfig, load_recipe


def stage(*overrides: str) -> PretrainStage:
    return load_recipe("tiny", overrides).stages[0]


def test_defaults() -> None:
    found = stage()
    assert found.optimizer == OptimizerConfig(
        betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8, clip_norm=1.0
    )
    assert (found.precision, found.recompute, found.rope_base) == ("auto", False, None)
    assert (found.keep_checkpoints, found.max_bad_steps) == (2, 5)
    assert load_recipe("tiny").data.heldout == 0.05


def test_a_budget_is_known_in_its_own_unit() -> None:
    budget = stage().budget
    assert (budget.length("steps"), budget.length("tokens")) == (12, None)


def test_a_tokenizer_may_come_from_a_file() -> None:
    recipe = load_recipe("tiny", ["tokenizer.path=here/tokenizer.json"])
    assert recipe.tokenizer == TokenizerConfig(path="here/tokenizer.json")


TWO_STAGES = "stages=[{s}, {s}]".format(
    s="{kind='pretrain', name='one', seq_len=4, budget={steps=2}, lr=[{shape='constant', to=1.0}],"
    " batch=[{tokens=8}], validate_every=1, checkpoint_every=1}"
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.0.batch.0.tokens=300",
            "stages.0: a batch of 300 tokens is not a multiple of seq_len 256; change one of them",
        ),
        ("tokenizer.vocab_size=513", "tokenizer.vocab_size 513 is more than model.vocab_size 512"),
        (
            "tokenizer={vocab_size=9, path='x'}",
            "tokenizer: vocab_size 9 and path x: give exactly one of them",
        ),
        (
            "stages.0.budget={steps=9, tokens=9}",
            "stages.0.budget: steps 9 and tokens 9: give exactly one of them",
        ),
        (TWO_STAGES, "2 stages are named 'one'; give each its own name"),
        ("stages=[]", "stages = []: must hold at least one element"),
        ("stages.0.kind=sft", "stages.0.kind = 'sft': must be 'pretrain'"),
        ("stages.0.name=../x", "stages.0.name = '../x': must serve as a folder name: a letter or"),
        ("stages.0.name='a b'", "stages.0.name = 'a b': must serve as a folder name"),
        *(
            (f"stages.0.name={name}", f"stages.0.name = '{name}': a run keeps data, lock, model,")
            for name in ("model", "Data", "tokenizer.json", "recipe.json", "report.json", "lock")
        ),
        ("stages.0.name=model.old.tmp", "stages.0.name = 'model.old.tmp': a run keeps data, lock"),
        ("stages.0.name=a/b", "stages.0.name = 'a/b': must serve as a folder name"),
        ("stages.0.name=''", "stages.0.name = '': must serve as a folder name"),
        (
            "stages.0.lr=[{shape='linear', to=1.0}, {shape='constant', to=1.0}]",
            "stages.0.lr: segment 0 needs a length; only the last may omit it",
        ),
        (
            "stages.0.batch=[{tokens=256}, {tokens=512}]",
            "stages.0.batch: segment 0 needs a length; only the last may omit it",
        ),
        (
            "stages.0.lr.0.unit=tokens",
            "stages.0.lr: the segments' units are steps and tokens; use one for all",
        ),
        (
            "stages.0.budget.tokens=9999",
            "stages.0: the last lr segment lasts to the end of the budget, which is not in steps; "
            "give the segment a length or the budget's unit",
        ),
        ("stages.0.lr=[]", "stages.0.lr = []: must hold at least one element"),
        ("stages.0.batch=[]", "stages.0.batch = []: must hold at least one element"),
        ("stages.0.lr.0.to=-1.0", "stages.0.lr.0.to = -1.0: must be greater than or equal to 0"),
        ("stages.0.lr.0.length=0", "stages.0.lr.0.length = 0: must be greater than 0"),
        ("stages.0.budget.steps=0", "stages.0.budget.steps = 0: must be greater than 0"),
        ("stages.0.seq_len=0", "stages.0.seq_len = 0: must be greater than 0"),
        ("stages.0.validate_every=0", "stages.0.validate_every = 0: must be greater than 0"),
        ("stages.0.optimizer.betas=[0.9, 1.0]", "stages.0.optimizer.betas.1 = 1.0: must be less"),
        ("data.heldout=0", "data.heldout = 0: must be greater than 0"),
        ("data.heldout=0.6", "data.heldout = 0.6: must be less than or equal to 0.5"),
        (f"seed={2**63}", f"seed = {2**63}: must be less than {2**63}"),
        ("seed=-1", "seed = -1: must be greater than or equal to 0"),
        ("model.ffn.topk=1", "model.ffn.topk: unknown field 'topk'; did you mean 'top_k'?"),
        ("stages.0.lrr=1", "stages.0.lrr: unknown field 'lrr'; did you mean 'lr'?"),
        ("stages.0.lr.1.shap=1", "stages.0.lr.1.shap: unknown field 'shap'; did you mean 'shape'?"),
    ],
)
def test_rules(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe("tiny", [override])
    assert f"  {message}" in str(error.value)


def test_a_bad_element_is_reported_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe("tiny", ["stages.0.seq_len=0"])
    assert len(str(error.value).split("\n")) == 2


def test_a_constant_rate_may_outlast_a_budget_in_the_other_unit() -> None:
    found = stage("stages.0.lr=[{shape='constant', to=1.0}]", "stages.0.budget.tokens=9999")
    assert found.budget.tokens == 9999


def test_a_rate_may_fall_to_zero() -> None:
    assert stage("stages.0.lr.1.to=0").lr[1].to == 0


def test_the_largest_seed() -> None:
    assert load_recipe("tiny", [f"seed={2**63 - 1}"]).seed == 2**63 - 1
