"""A Llama with a vocabulary of 63 words, its tokenizer, and text of these words."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.frameworks.comparing import optional

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]


def tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = optional("tokenizers")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def text(seed: int, least: int = 3, most: int = 12) -> str:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(least, most, (), generator=generator))
    return " ".join(f"w{number}" for number in torch.randint(60, (length,), generator=generator).tolist())
