"""The faults of the ports, and other legal ways to write them."""

from __future__ import annotations

from tests.corpora.unseen.programs import Edit

# what torch.optim does is one line of the reference
OPTIMIZER = ("optimizer.step()",)

# fmt: off
FAULTS = {
    "mamba_step_without_bias": Edit(
        'dt = F.softplus(dt)\n        decay', 'dt = F.softplus(dt - self.w("layers", i, "dt_proj.bias"))\n        decay',
        ("dt = F.softplus(self.dt_proj(dt))",)),
    "mamba_convolution_looks_ahead": Edit(
        "F.pad(x, (0, 0, KERNEL - 1, 0))", "F.pad(x, (0, 0, KERNEL - 2, 1))",
        ("x = self.conv1d(x.transpose(1, 2))",), ('x = torch.einsum("blck,ck->blc", windows',)),
    "mamba_skip_without_input": Edit(
        'y = torch.addcmul(y, x, self.w("layers", i, "D"))', 'y = y + self.w("layers", i, "D")',
        ("y = torch.stack(outputs, 1) + x * self.D",)),
    "mamba_b_and_c_exchanged": Edit(
        "rank, b, c = projected", "rank, c, b = projected",
        ("dt, b, c = self.x_proj(x)", "state = decay * state + dt[:, t, :, None] * b"), ('state = torch.einsum("bli,bls->blis", dt * x, b)',)),
    "rwkv_decay_off_by_one": Edit(
        "(t[:, None] - t[None, :] - 1).float()", "(t[:, None] - t[None, :]).float()",
        ("top = torch.maximum(largest + decay, kt)", "e1, e2 = torch.exp(largest + decay - top)", "num, den, largest = e1 * num"),
        ("logits = k.transpose(1, 2)[:, :, None, :] - torch",)),
    "rwkv_shift_wraps_around": Edit(
        "earlier = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)", "earlier = torch.roll(y, 1, 1)",
        ("before = F.pad(x, (0, 0, 1, -1))",)),
    "rwkv_relu_not_squared": Edit(
        "k = k.clamp(min=0).square()", "k = k.clamp(min=0)", ("return r * self.value(torch.relu(k) ** 2)",)),
    "rwkv_bonus_of_decay": Edit(
        "present = k.transpose(1, 2) + u[:, None]", "present = k.transpose(1, 2) + w[:, None]",
        ("top = torch.maximum(largest, self.first + kt)", "e1, e2 = torch.exp(largest - top), torch.exp(self.first")),
    "moe_weights_not_renormalized": Edit(
        "top, index = logits.topk(CHOSEN)\n        top = top.softmax(-1)", "top, index = logits.softmax(-1).topk(CHOSEN)\n        top = top.contiguous()",
        ("weights = weights / weights.sum(-1, keepdim=True)",), ("return torch.zeros_like(logits).scatter(-1, index, top)",)),
    "moe_gate_and_up_exchanged": Edit(
        "F.silu(gate) * up, self.w2)", "F.silu(up) * gate, self.w2)", ("return self.w2(F.silu(self.w1(x)) * self.w3(x))",)),
    "moe_shared_gate_without_sigmoid": Edit(
        "scale = self.shared_gate(x).sigmoid()", "scale = self.shared_gate(x)",
        ("result = result + torch.sigmoid(self.shared_gate(x)) * self.shared(x)",), ("return hidden + routed + scale * common",)),
    "moe_residual_of_the_norm": Edit(
        "return hidden + routed", "return x + routed", ("return hidden + result.view_as(hidden)",)),
    "unet_padding_before": Edit(
        "F.pad(second, (0, 1, 0, 1))", "F.pad(second, (1, 0, 1, 0))", ("h = self.pool(F.pad(skips[-1], (0, 1, 0, 1)))",)),
    "unet_scale_and_shift_exchanged": Edit(
        "scale, shift = film[:, :half], film[:, half:]", "shift, scale = film[:, :half], film[:, half:]",
        ("scale, shift = self.emb(F.silu(emb))", "h = self.norm_out(h) * (1 + scale) + shift"), ("h = torch.addcmul(shift[:, :, None, None]",)),
    "unet_skip_first": Edit(
        "torch.cat((x, second), 1)", "torch.cat((second, x), 1)", ("h = self.up1(torch.cat([h, skips.pop()], 1), emb)",)),
    "unet_epsilon": Edit(
        "torch.sqrt(var + 1e-5)", "torch.sqrt(var + 1e-3)", ("h = self.conv_in(F.silu(self.norm_in(x)))",)),
    "unet_upsampling_tiles": Edit(
        "x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)", "x = x.repeat(1, 1, 2, 2)", ("h = self.upconv(F.interpolate(h",)),
    "vq_distance_without_two": Edit(
        "distance = distance - 2 * vectors @ self.codes", "distance = distance - vectors @ self.codes",
        ("index = torch.cdist(flat, self.codebook).argmin(1)",)),
    "vq_average_turned": Edit(
        "self.sums = torch.lerp(self.sums, sums, 0.01)", "self.sums = torch.lerp(self.sums, sums, 0.99)",
        ("self.embed_avg.mul_(0.99).add_(one_hot.T @ flat, alpha=0.01)",)),
    "vq_smoothing_of_one_code": Edit(
        "/ (n + CODES * 1e-2)", "/ (n + 1e-2)", ("smoothed = (self.cluster_size + 1e-2)",)),
    "vq_commitment_summed": Edit(
        "commitment = (vectors - chosen).pow(2).mean()", "commitment = (vectors - chosen).pow(2).sum(1).mean()",
        ("loss = 0.25 * F.mse_loss(z, quantized)",)),
    "ddim_guidance_exchanged": Edit(
        "unconditional, conditional = prediction.chunk(2)", "conditional, unconditional = prediction.chunk(2)",
        ("eps = uncond + GUIDANCE * (cond - uncond)",), ("guided = torch.lerp(",)),
    "ddim_next_step_is_one_before": Edit(
        "self.timesteps[index + 1] if index + 1 < COUNT else 0].item()", "self.timesteps[index] - 1].item()",
        ("x = a_next**0.5 * x0 + (1 - a_next) ** 0.5 * eps",), ("direction = (1 - later)", "return original.mul_(")),
    "ddim_clip_to_one": Edit(
        "original = torch.clamp(original, min=-3, max=3)", "original = torch.clamp(original, min=-1, max=1)", ("x0 = x0.clamp(-3, 3)",)),
    "dit_time_unscaled": Edit(
        "torch.full((len(latents),), now * 1000)", "torch.full((len(latents),), now)", ("velocity = model(x, (sigmas[i] * 1000)",)),
    "dit_shift_turned": Edit(
        "times = [SHIFT * t / (1 + (SHIFT - 1) * t) for t in times]", "times = [t / (t + SHIFT * (1 - t)) for t in times]",
        ("sigmas = SHIFT * sigmas / (1 +",), ("flow = model(latents, torch.full(", "latents = latents - (now - later) * flow")),
    "dit_scale_before_shift": Edit(
        "shift1, scale1, gate1, shift2, scale2, gate2 = (m[:, None]", "scale1, shift1, gate1, shift2, scale2, gate2 = (m[:, None]",
        ("shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(", "x = x + gate1.unsqueeze(1) * self.attention(", "return x * (1 + scale.unsqueeze(1))"),
        ("y = torch.addcmul(shift1, y, 1 + scale1)",)),
    "dit_channels_before_pixels": Edit(
        "x.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)", "x.unflatten(-1, (4, 4)).flatten(-2)",
        ('return torch.einsum("nhwpqc->nchpwq", x)', "x = x.reshape(len(x), h, w, 2, 2, 4)"), ("return F.pixel_shuffle(",)),
    "dit_sign_of_the_flow": Edit(
        "latents = latents - (now - later) * flow", "latents = latents + (now - later) * flow", ("x = x + (sigmas[i + 1] - sigmas[i]) * velocity",)),
    "dit_rows_and_columns_exchanged": Edit(
        "for p in (down, along)", "for p in (along, down)", ("return torch.cat([sincos(ys", "x = self.patch(x).flatten(2)")),
    "t5_sign_of_the_distance": Edit(
        "(half if distance > 0 else 0)", "(half if distance < 0 else 0)",
        ("result = (relative > 0).long() * half", "return result + torch.where", "bias = self.relative(self.bucket(relative))"),
        ("slots = torch.tensor([slot(d)", "line = self.table.weight[slots].T")),
    "t5_logits_scaled": Edit(
        "expand(len(x), -1, -1), q, k.mT)", "expand(len(x), -1, -1), q, k.mT, alpha=HEAD**-0.5)",
        ("scores = torch.matmul(q, k.transpose(3, 2))", "scores = scores + bias")),
    "t5_gelu_exact": Edit(
        'gate = F.gelu(gate, approximate="tanh")', "gate = F.gelu(gate)", ("return x + self.wo(F.gelu(",)),
    "t5_mask_of_queries": Edit(
        "logits.masked_fill(hidden[:, None, :], -1e9)", "logits.masked_fill(hidden[:, :, None], -1e9)",
        ("scores = scores + bias", "bias = bias + (1 - mask[:, None, None, :]")),
    "t5_bias_turned": Edit(
        "line.unfold(1, count, 1).flip(1)", "line.unfold(1, count, 1)", ("bias = self.relative(self.bucket(relative))",)),
    "wavenet_gate_halves": Edit(
        "y[:, :CHANNELS].tanh() * y[:, CHANNELS:].sigmoid()", "y[:, :CHANNELS].sigmoid() * y[:, CHANNELS:].tanh()",
        ("y = torch.tanh(a) * torch.sigmoid(b)", "a, b = y.chunk(2, 1)")),
    "wavenet_queue_too_long": Edit(
        "for _ in range(d)] for d in DILATIONS]", "for _ in range(d + 1)] for d in DILATIONS]",
        ("y = self.conv(F.pad(x, (self.dilation, 0)))",), ("old, now = queue.pop(0), x", "F.linear(old, layer.conv")),
    "wavenet_residual_halved": Edit(
        "x = x * 2**-0.5", "x = x * 0.5", ("return (x + self.residual(y)) * 0.5**0.5",)),
    "seq2seq_reset_of_both_parts": Edit(
        "torch.tanh(xn + reset * hn)", "torch.tanh(reset * (xn + hn))", ("memory, final = self.encoder(",)),
    "seq2seq_update_turned": Edit(
        "update * h + (1 - update) * new", "(1 - update) * h + update * new", ("memory, final = self.encoder(",)),
    "seq2seq_last_state_backwards": Edit(
        "backwards[:, 0]], -1)", "backwards[:, -1]], -1)", ("hidden = torch.tanh(self.bridge(",), ("h = old.bridge(last).tanh()",)),
    "seq2seq_query_bias_missing": Edit(
        "old.wk.bias + old.wq.bias)", "old.wk.bias)", ("score = self.v(torch.tanh(self.wq(hidden)",), ("energy = torch.tanh(keys",)),
    "gnn_edges_turned": Edit(
        "adjacency[edges[1], edges[0]] = 1", "adjacency[edges[0], edges[1]] = 1",
        ("degree = torch.zeros(NODES).index_add_(", "src, dst = torch.cat(")),
    "gnn_degree_of_senders": Edit(
        "degree = adjacency.sum(1)", "degree = adjacency.sum(0)", ("degree = torch.zeros(NODES).index_add_(",)),
    "gnn_softmax_over_receivers": Edit(
        "torch.softmax(scores, -1) @ z", "torch.softmax(scores, -2) @ z",
        ("total = torch.zeros(NODES, HEADS).index_add_(", "weight = weight / total[dst]", "out = torch.zeros(NODES, HEADS, WIDTH)")),
    "gnn_slope": Edit(
        "sent[:, None, :], 0.2)", "sent[:, None, :], 0.01)", ("alpha = F.leaky_relu(alpha, 0.2)",)),
    "melspec_window_symmetric": Edit(
        "torch.cos(2 * math.pi * n / FFT)", "torch.cos(2 * math.pi * n / (FFT - 1))", ("stft = torch.stft(",), ("frames = frames * window.float()",)),
    "melspec_filters_not_normalized": Edit(
        "columns.append(triangle * 2 / (high - low))", "columns.append(triangle)",
        ("return weights * (2 /", "log = torch.clamp(filter_bank() @")),
    "melspec_padding_zeros": Edit(
        'mode="reflect"', 'mode="constant"', ("stft = torch.stft(",)),
    "melspec_epsilon": Edit(
        "self.norm_running_var + 1e-5", "self.norm_running_var + 1e-3", ("x = self.norm(x).transpose(1, 2)",)),
    "nerf_bands_without_pi": Edit(
        "bands = math.pi * 2 ** torch.arange(levels)", "bands = 1.0 * 2 ** torch.arange(levels)",
        ("parts += [torch.sin(",), ("angles = x[..., None, :] * bands",)),
    "nerf_passed_includes_the_sample": Edit(
        "F.pad(optical.cumsum(-1)[:, :-1], (1, 0))", "optical.cumsum(-1)",
        ("through = torch.cumprod(",), ("weights = torch.exp(-passed)",)),
    "nerf_skip_after_hidden": Edit(
        "by_point, by_hidden = self.layer2_weight.tensor_split([encoded.shape[-1]], 1)",
        "by_hidden, by_point = self.layer2_weight.tensor_split([WIDTH], 1)",
        ("h = F.relu(self.layer2(torch.cat([encoded, h], -1)))",), ("h = encoded @ by_point.T",)),
    "nerf_length_of_the_ray": Edit(
        "optical = density * (step * length)", "optical = density * step", ("deltas = torch.cat(", "alpha = 1 - torch.exp(")),
    "adamw_second_moment_not_corrected": Edit(
        "v_hat = v / (1 - 0.95**self.count)", "v_hat = v / 1.0", OPTIMIZER, ("p -= rate * m_hat",)),
    "adamw_first_moment_slower": Edit(
        "m.lerp_(p.grad, 0.1)", "m.lerp_(p.grad, 0.05)", OPTIMIZER),
    "adamw_decay_of_norms": Edit(
        "if p.dim() > 1:\n                p -=", "if p.dim() > 0:\n                p -=", OPTIMIZER),
    "adamw_warm_up_off_by_one": Edit(
        "warm = min(1.0, (step + 1) / WARMUP)", "warm = min(1.0, (step + 1) / (WARMUP + 1))", OPTIMIZER, ("p -= rate * 0.1 * p", "p -= rate * m_hat")),
    "adamw_smoothing_among_others": Edit(
        "torch.full_like(logp, 0.1 / CLASSES)", "torch.full_like(logp, 0.1 / (CLASSES - 1))", ("loss = F.cross_entropy(",)),
    "adamw_mean_over_ignored": Edit(
        "(losses * kept).sum() / kept.sum()", "(losses * kept).mean()", ("loss = F.cross_entropy(",)),
    "decode_position_counts_calls": Edit(
        "start += fresh.shape[1]", "start += 1", ("torch.arange(tokens.shape[1])[:, None]",),
        ("place = torch.arange(start,", "angles = torch.outer(place.float()")),
    "decode_penalty_of_negatives": Edit(
        "torch.where(logits > 0, logits / 1.3, logits * 1.3)", "logits / 1.3", ("seen = torch.where(seen < 0,",)),
    "decode_heads_interleaved": Edit(
        "grouped = q.unflatten(1, (KEYS, -1))", "grouped = q.unflatten(1, (-1, KEYS)).transpose(1, 2)",
        ("k, v = k.repeat_interleave(", "scores = q @ k.transpose(-1, -2)"), ('scores = torch.einsum("bkgqd',)),
    "decode_embedding_unscaled": Edit(
        "x = self.embed_weight[tokens] * WIDTH**0.5", "x = self.embed_weight[tokens]", ("x = self.embed(tokens) * WIDTH**0.5",)),
}

LEGAL = {
    "mamba_norm_by_hand": Edit(
        'normed = F.rms_norm(hidden, (WIDTH,), self.w("layers", i, "norm.weight"), 1e-5)',
        'normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w("layers", i, "norm.weight")'),
    "rwkv_channels_in_parts": Edit(
        "mixed = wkv(att.decay, att.first, k, v)",
        "mixed = torch.cat([wkv(att.decay[s], att.first[s], k[..., s], v[..., s]) for s in (slice(0, 10), slice(10, None))], -1)"),
    "moe_expert_after_expert": Edit(
        'down = torch.einsum("btei,ewi->btew", F.silu(gate) * up, self.w2)',
        "down = torch.stack([F.silu(gate[:, :, e]) * up[:, :, e] @ self.w2[e].T for e in range(EXPERTS)], 2)"),
    "unet_attention_image_after_image": Edit(
        "F.scaled_dot_product_attention(q, k, v)[:, 0]",
        "torch.cat([F.scaled_dot_product_attention(*(t[i : i + 1] for t in (q, k, v))) for i in range(len(q))])[:, 0]"),
    "vq_codes_by_one_hot": Edit(
        "chosen = self.codes.T[assigned]", "chosen = F.one_hot(assigned, CODES).float() @ self.codes.T"),
    "ddim_guidance_as_a_sum": Edit(
        "guided = torch.lerp(unconditional, conditional, GUIDANCE)",
        "guided = (1 - GUIDANCE) * unconditional + GUIDANCE * conditional"),
    "dit_image_after_image": Edit(
        "flow = model(latents, torch.full((len(latents),), now * 1000), labels)",
        "flow = torch.cat([model(x[None], torch.tensor([now * 1000]), y[None]) for x, y in zip(latents, labels, strict=True)])"),
    "t5_softmax_by_hand": Edit(
        "outputs.append(logits.softmax(-1) @ v)",
        "powers = torch.exp(logits - logits.amax(-1, keepdim=True))\n            outputs.append(powers @ v / powers.sum(-1, keepdim=True))"),
    "wavenet_skips_added_in_place": Edit(
        "y = F.relu(torch.stack(skips).sum(0))",
        "total = skips[0].clone()\n            for skip in skips[1:]:\n                total += skip\n            y = F.relu(total)"),
    "seq2seq_one_product_of_gates": Edit(
        "new = torch.tanh(xn + reset * hn)\n    return update * h + (1 - update) * new",
        "new = torch.tanh(torch.addcmul(xn, reset, hn))\n    return torch.lerp(new, h, update)"),
    "gnn_nodes_renumbered": Edit(
        "old = self.old\n        adjacency", "old, x, edges = self.old, x.flip(0), NODES - 1 - edges\n        adjacency"),
    "nerf_rays_in_parts": Edit(
        "colour, density = field(points, directions / length)",
        "parts = [field(points[s], (directions / length)[s]) for s in (slice(0, 4), slice(4, None))]\n    colour, density = (torch.cat(p) for p in zip(*parts, strict=True))"),
    "adamw_gradients_in_one_row": Edit(
        "total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()", "total = torch.cat([g.flatten() for g in grads]).norm()"),
    "melspec_fft_of_frames": Edit(
        "real, imaginary = frames @ waves.cos().float(), frames @ waves.sin().float()",
        "bins = torch.fft.rfft(frames)\n        real, imaginary = bins.real, bins.imag"),
    "decode_prompt_in_parts": Edit(
        "cache, scores, fresh, start = {}, [], tokens, 0", "cache, scores, fresh, start = {}, [], tokens[:, 4:], 4\n    model(tokens[:, :4], 0, cache)"),
}
