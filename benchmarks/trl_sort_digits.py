"""TRL's half of `loop_vs_trl.py`: the same model, tasks and hyper-parameters under TRL's GRPOTrainer.

Runs in a virtual environment of its own (.venv-trl) and imports nothing of nexrl: what the two halves share comes in as
a recipe, a JSON file that `loop_vs_trl.py` writes. Settings that are not the recipe's are the fastest found for this
size on a CPU: float32, no vLLM, one micro-batch, fused AdamW, no logging, no saving, no gradient checkpointing.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Recipe = dict[str, Any]


class StepClock(TrainerCallback):
    """Notes when each training step ended, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.step_end_seconds: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.step_end_seconds.append(time.perf_counter())


def main() -> None:
    """Train as the recipe says; write when each step ended and what the policy earned on average in the last steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe: Recipe = json.loads(arguments.recipe.read_text())
    arguments.result.write_text(json.dumps(train(recipe, arguments.result.parent)))


def train(recipe: Recipe, output_dir: Path) -> dict[str, list[float]]:
    """Run GRPOTrainer; returns the end of each step (seconds, arbitrary zero) and the mean reward of each step."""
    task = _load_task(Path(recipe["task_module"]))
    rewards: list[float] = []
    clock = StepClock()
    tokenizer = AutoTokenizer.from_pretrained(recipe["model"])
    model = AutoModelForCausalLM.from_pretrained(recipe["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe["learning_rate"], betas=tuple(recipe["betas"]), weight_decay=0.0, fused=True
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_reward_function(task.reward, tokenizer.eos_token_id, rewards),
        args=_config(recipe, output_dir),
        train_dataset=Dataset.from_list(task.tasks("train")),
        processing_class=tokenizer,
        callbacks=[clock],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(recipe))),
    )
    trainer.train()
    return {"step_end_seconds": clock.step_end_seconds, "reward": rewards}


def _config(recipe: Recipe, output_dir: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=recipe["steps"],
        per_device_train_batch_size=recipe["batch_size"],
        num_generations=recipe["group_size"],
        max_completion_length=recipe["max_new_tokens"],
        temperature=1.0,
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=recipe["clip_low"],
        epsilon_high=recipe["clip_high"],
        entropy_coef=recipe["entropy_coefficient"],
        max_grad_norm=recipe["gradient_clip"],
        seed=recipe["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _schedule(recipe: Recipe) -> Callable[[int], float]:
    """Learning rate as a share of the highest: linear warm-up, then linear to the final ratio at the last step."""
    warmup, steps, final = recipe["warmup_steps"], recipe["steps"], recipe["final_learning_rate_ratio"]

    def share(step: int) -> float:
        if step < warmup:
            return float((step + 1) / warmup)
        return float(1 - (1 - final) * (step - warmup) / max(1, steps - warmup))

    return share


def _reward_function(
    reward: Callable[..., dict[str, float]], eos_token_id: int, means: list[float]
) -> Callable[..., list[float]]:
    """The task's reward in the form that TRL calls, noting the mean of each call."""

    def score(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
        rows = zip(completions, completion_ids, answer, strict=True)
        rewards = [reward({"answer": right}, text, eos_token_id in ids)["reward"] for text, ids, right in rows]
        means.append(sum(rewards) / len(rewards))
        return rewards

    return score


def _load_task(path: Path) -> Any:
    """The example's own module, so that both halves are rewarded by the same code."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
