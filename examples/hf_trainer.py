"""Hugging Face's ``Trainer``, plain and with instep, compared: ``python examples/hf_trainer.py``.

A small language model learns Python's help texts, with the clipping a ``Trainer`` does unless told otherwise, gradient
accumulation, warm-up, and evaluation in between. For each way it prints the most gradient memory that there was. It
needs ``pip install 'instep[hf]'``; nothing is downloaded. On two ranks, where DDP keeps all gradients in any case:
``torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py``.
"""

import pydoc_data.topics
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import instep
from instep.integrations.transformers import InstepCallback

LENGTH, ROWS = 32, 140


def data() -> list[dict[str, torch.Tensor]]:
    text = "\n".join(pydoc_data.topics.topics.values()).encode()[: LENGTH * ROWS]
    rows = torch.tensor(list(text)).view(ROWS, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(directory: str, callbacks: list[TrainerCallback]) -> tuple[Trainer, int]:
    """Returns the trainer, and the most bytes of gradients that were there when one was complete."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        directory,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        learning_rate=3e-3,
        warmup_steps=3,
        num_train_epochs=2,
        eval_strategy="epoch",
        logging_steps=5,
        save_strategy="no",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    rows = data()
    trainer = Trainer(
        LlamaForCausalLM(config), arguments, train_dataset=rows[20:], eval_dataset=rows[:20], callbacks=callbacks
    )
    trainer.remove_callback(PrinterCallback)
    parameters, most = list(trainer.model.parameters()), 0

    def look(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in parameters if type(p.grad) is torch.Tensor))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(look)
    trainer.train()
    return trainer, most


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        plain, most = train(directory, [])
        two_pass = instep.ClipNorm(1.0, mode="two_pass")
        callbacks = {
            "schedule='forward'": InstepCallback(),
            "schedule='backward', undo=True": InstepCallback(schedule="backward", undo=True),
            "schedule='backward', together=True": InstepCallback(schedule="backward", clip=two_pass, together=True),
        }
        runs = {options: train(directory, [callback]) for options, callback in callbacks.items()}
    if plain.is_world_process_zero():
        for entry in plain.state.log_history:
            told = {key: entry[key] for key in ("loss", "grad_norm", "eval_loss") if key in entry}
            if told:
                print(f"step {entry['step']}: " + ", ".join(f"{key} {value:.4f}" for key, value in told.items()))
    failed = False
    for options, (run, its_most) in runs.items():
        weights = all(map(torch.equal, plain.model.parameters(), run.model.parameters()))
        said = [
            [(entry.get("loss"), entry.get("grad_norm"), entry.get("eval_loss")) for entry in one.state.log_history]
            for one in (plain, run)
        ]
        equal = weights and said[0] == said[1]
        failed |= not equal
        if plain.is_world_process_zero() or not equal:
            print(f"{options}: weights, losses and gradient norms are {'equal' if equal else 'NOT equal'}")
            print(f"    at most {its_most / 1024:.0f} KiB of gradients, and {most / 1024:.0f} without instep")
    if dist.is_initialized():
        dist.destroy_process_group()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
