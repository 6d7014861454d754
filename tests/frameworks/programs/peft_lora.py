"""LoRA with peft on a tiny transformer: most parameters are frozen, only the adapters are trained."""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import LlamaConfig, LlamaForCausalLM

from results import save, text

BLOCK, SYMBOLS, BATCH, STEPS = 12, 31, 4, 6


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(17)
    config = LlamaConfig(
        vocab_size=SYMBOLS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=BLOCK,
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = DDP(get_peft_model(LlamaForCausalLM(config), lora))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    data = text(BLOCK * BATCH * 2 * STEPS, SYMBOLS).view(STEPS, 2, BATCH, BLOCK)
    for step in range(STEPS):
        tokens = data[step, dist.get_rank()]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert len(get_peft_model_state_dict(model.module)) == len(trained)
    save(model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
