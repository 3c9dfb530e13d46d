"""The faults of families that were written without sight of the comparison, and legal edits."""

from __future__ import annotations

from tests.corpora.unseen.programs import Edit

FAULTS = {
    "mla_scale_of_the_content_part_alone": Edit(
        "layer.down_proj.weight, (NOPE + ROPE) ** -0.5",
        "layer.down_proj.weight, NOPE**-0.5",
        reference=("key.transpose(-1, -2) * (NOPE + ROPE) ** -0.5",),
        at=("(self.scale * scores)",),
    ),
    "mla_positions_start_again_after_the_prefix": Edit(
        "where = torch.arange(start, stop)[:, None]",
        "where = torch.arange(stop - start)[:, None]",
        reference=("positions = torch.arange(length)", "torch.outer(positions.float()"),
        at=("angles = where / 100.0",),
    ),
    "mla_latent_kept_before_its_norm": Edit(
        "latents[:, start:stop] = F.rms_norm(latent, (KV_RANK,), self.kv_norm, 1e-6)",
        "latents[:, start:stop] = latent",
        reference=("self.kv_b_proj(self.kv_a_norm(latent))",),
    ),
    "mla_mask_lets_the_next_token_through": Edit(
        "future = torch.arange(stop) > torch.arange(start, stop)[:, None]",
        "future = torch.arange(stop) > torch.arange(start + 1, stop + 1)[:, None]",
        reference=("mask = torch.full((length, length), -torch.inf).triu(1)", "(scores + mask)"),
        at=(".masked_fill(future",),
    ),
    "mla_gate_and_up_exchanged": Edit(
        "gate, up = F.linear(",
        "up, gate = F.linear(",
        reference=("F.silu(self.gate_proj(y)) * self.up_proj(y)",),
        at=("F.silu(gate) * up",),
    ),
    "swin_shift_the_other_way": Edit(
        "index = (row + shift) % side * side + (column + shift) % side",
        "index = (row - shift) % side * side + (column - shift) % side",
        reference=(
            "torch.roll(y, (-self.shift, -self.shift), (1, 2))",
            "torch.roll(y, (self.shift, self.shift), (1, 2))",
        ),
        at=('"attn.qkv")[:, :, index]', "back[:, :, index.flatten()]"),
    ),
    "swin_relative_positions_negated": Edit(
        "row, column = row[0, :, None] - row[0], column[0, :, None] - column[0]",
        "row, column = row[0] - row[0, :, None], column[0] - column[0, :, None]",
        reference=(
            "(coords[:, :, None] - coords[:, None, :])",
            "self.index = relative[..., 0]",
            "self.table[self.index.view(-1)]",
        ),
        at=("bias = table[:, row",),
    ),
    "swin_mask_of_rows_only": Edit(
        "wraps = (row >= side - shift).long() + 2 * (column >= side - shift).long()",
        "wraps = (row >= side - shift).long()",
        reference=(
            "for columns in cuts",
            "regions[:, rows, columns] = count",
            "self.mask = -100.0",
            "+ mask[:, None]",
        ),
        at=("apart = wraps", "masked_fill(apart"),
    ),
    "swin_corners_merged_row_by_row": Edit(
        ".permute(0, 3, 2, 1, 4)",
        ".permute(0, 2, 3, 1, 4)",
        reference=("corners = [x[:, 0::2, 0::2]", "self.norm(torch.cat(corners, -1))"),
        at=("@ self.normed(corners",),
    ),
    "swin_pooled_before_the_norm": Edit(
        'pooled = self.normed(x, "norm").mean(2)',
        'pooled = self.normed(x.mean(2, keepdim=True), "norm")[..., 0]',
        reference=("self.head(self.norm(x).flatten(1, 2).mean(1))",),
    ),
    "whisper_convolutions_padded_on_the_left_only": Edit(
        "F.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride)",
        "F.pad(x, (0, 0, 2, 0)).unfold(1, 3, stride)",
        reference=("F.gelu(self.conv2(F.gelu(self.conv1(mels))))",),
        at=("windows.flatten(2) @ weight.flatten(1).T",),
    ),
    "whisper_timescales_divided_by_the_half_width": Edit(
        "1e-4 ** torch.linspace(0, 1, WIDTH // 2)",
        "1e-4 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))",
        reference=("inverse = torch.exp(", "times = torch.arange(x.shape[1])[:, None] * inverse"),
    ),
    "whisper_single_steps_masked_from_the_top_left": Edit(
        "causal=not rows)",
        "causal=True)",
        reference=(
            "mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)",
            "(q @ k + mask).softmax(-1)",
        ),
        at=("is_causal=causal)",),
    ),
    "whisper_offset_counts_steps_not_tokens": Edit(
        "offset += x.shape[1]",
        "offset += 1",
        reference=("self.positions[: tokens.shape[1]]",),
        at=("self.positions[offset : offset + x.shape[1]]",),
    ),
    "whisper_audio_without_its_last_norm": Edit(
        'return self.normed(x, "encoder.ln_post")',
        "return x",
        reference=("return self.ln_post(x)",),
    ),
    "convnext_response_norm_over_channels": Edit(
        "energy = y.square().sum((1, 2), keepdim=True).sqrt()",
        "energy = y.square().sum(-1, keepdim=True).sqrt()",
        reference=("energy = torch.norm(x, p=2, dim=(2, 3), keepdim=True)",),
    ),
    "convnext_layer_scale_on_the_sum": Edit(
        "return torch.addcmul(x, y, self.scale)",
        "return (x + y) * self.scale",
        reference=("return x + self.gamma[:, None, None] * self.pwconv2(y)",),
    ),
    "convnext_patches_column_by_column": Edit(
        "return x.transpose(2, 3).flatten(3)",
        "return x.permute(0, 1, 3, 4, 2, 5).flatten(3)",
        reference=("x = stage(downsample(x))",),
        at=("self.stem(cells(", "self.downs[i - 1](cells("),
    ),
    "convnext_upsampling_by_tiles": Edit(
        "merged.repeat_interleave(2, 1).repeat_interleave(2, 2)",
        "merged.repeat(1, 2, 2, 1)",
        reference=("above = F.interpolate(",),
    ),
    "convnext_pyramid_passes_the_smoothed_map_down": Edit(
        "smoothed = torch.einsum(",
        "smoothed = merged = torch.einsum(",
        reference=("above = F.interpolate(", "maps[level - 1] = maps[level - 1] + above"),
        at=("side = side + merged",),
    ),
    "hyena_positions_end_before_one": Edit(
        "position = steps / (length - 1)",
        "position = steps / length",
        reference=("t = torch.linspace(0, 1, length)[:, None]",),
    ),
    "hyena_window_without_shift": Edit(
        "taps = torch.addcmul(SHIFT * h, h, window)",
        "taps = h * window",
        reference=("h = h * (torch.exp(-t * self.deltas.abs()) + SHIFT)",),
    ),
    "hyena_kernel_not_flipped": Edit(
        "kernel = taps[1].flip(-1)[:, None]",
        "kernel = taps[1][:, None]",
        reference=(
            "y = torch.fft.irfft(spectrum, n=n)",
            "spectrum = torch.fft.rfft(u, n=n)",
        ),
        at=("long = F.conv1d(channels, kernel, groups=WIDTH)",),
    ),
    "hyena_short_convolution_centred": Edit(
        "padded = F.pad(u, (0, 0, KERNEL - 1, 0))",
        "padded = F.pad(u, (0, 0, KERNEL // 2, KERNEL // 2))",
        reference=("u = self.short_filter(u)[..., : x.shape[1]]",),
        at=("u += padded[:, j : j + length] * short[:, j]",),
    ),
    "hyena_skip_after_the_gate": Edit(
        "v = (long + skip[0] * v) * gate_1",
        "v = long * gate_1 + skip[0] * v",
        reference=("return y + u * d[:, None]", "v = v * gate\n"),
    ),
    "flow_pixels_not_counted": Edit(
        "cost = cost - PIXELS * torch.linalg.slogdet(matrix).logabsdet",
        "cost = cost - torch.linalg.slogdet(matrix).logabsdet",
        reference=(
            "return x, logdet + x.shape[2] * x.shape[3] * self.log_s.sum()",
            "return x, logdet + self.logs.sum() * x.shape[2] * x.shape[3]",
        ),
    ),
    "flow_actnorm_bias_not_scaled": Edit(
        'offset = matrix @ self.w("layers", 4 * step, "bias")',
        'offset = weight @ self.w("layers", 4 * step, "bias")',
        reference=(
            "x = x + self.bias[:, None, None]",
            "x = x * torch.exp(self.logs)[:, None, None]",
            "x = F.conv2d(x, (self.p @ lower @ upper)[:, :, None, None])",
        ),
    ),
    "flow_permutation_inverted": Edit(
        "self.orders = [layer.order for layer in reference.layers[2::4]]",
        "self.orders = [layer.order.argsort() for layer in reference.layers[2::4]]",
        reference=("return x[:, self.order], logdet",),
        at=(
            "return matrix[self.orders[step]], offset[self.orders[step]]",
            "x = x @ matrix.T + offset",
        ),
    ),
    "flow_scale_and_shift_exchanged": Edit(
        "raw, shift = self.nets(step, grid).chunk(2, -1)",
        "shift, raw = self.nets(step, grid).chunk(2, -1)",
        reference=(
            "scale = torch.sigmoid(self.scale_net(kept) + 2.0)",
            "moved = changed + self.shift_net(kept)",
        ),
        at=(
            "squeeze = F.softplus(-(raw + 2.0))",
            "changed = torch.exp(-squeeze) * (changed + shift)",
        ),
    ),
    "flow_normal_constant_not_halved": Edit(
        "cost = cost + PIXELS * (self.prior_logs + 0.5 * math.log(2 * math.pi)).sum()",
        "cost = cost + PIXELS * (self.prior_logs + math.log(2 * math.pi)).sum()",
        reference=("log_likelihood = prior.log_prob(z).sum((1, 2, 3)) + logdet",),
    ),
    "lora_value_adapter_on_the_key": Edit(
        "delta = torch.cat([q_b @ q_a, torch.zeros(WIDTH, WIDTH), v_b @ v_a])",
        "delta = torch.cat([q_b @ q_a, v_b @ v_a, torch.zeros(WIDTH, WIDTH)])",
        reference=(
            "return self.base(x) + x @ self.lora_a.T @ self.lora_b.T * (ALPHA / RANK)",
            "projected = [projection(normed) for projection in (self.q, self.k, self.v)]",
        ),
        at=(
            "return fused + delta * (ALPHA / RANK)",
            'qkv = self.normed("norm_1", x) @ self.merged(*adapters).T + bias',
        ),
    ),
    "lora_mean_over_masked_labels_too": Edit(
        "return (surprise * known).sum() / known.sum()",
        "return (surprise * known).mean()",
        reference=("loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100)",),
    ),
    "lora_last_micro_batch_only": Edit(
        "sums = [total + gradient for total, gradient in zip(sums, fresh)]",
        "sums = list(fresh)",
        reference=("(loss / ACCUMULATE).backward()",),
        at=("length = torch.stack([gradient.square().sum() for gradient in sums])",),
    ),
    "lora_warm_up_starts_at_zero": Edit(
        "ramp, wave = (count + 1) / WARMUP,",
        "ramp, wave = count / WARMUP,",
        reference=(
            "return (step + 1) / WARMUP",
            "optimizer.step()",
            "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)",
        ),
        at=(
            "rate = PEAK * (ramp if count < WARMUP else wave)",
            "weight.mul_(1 - rate * DECAY)",
            "weight.sub_(rate / correction_1 * m / scale)",
        ),
    ),
    "lora_decay_through_the_moments": Edit(
        "weight.mul_(1 - rate * DECAY)",
        "gradient = gradient + DECAY * weight",
        reference=("optimizer.step()", "optimizer = torch.optim.AdamW(adapters, **options)"),
    ),
    "rectified_sine_before_cosine": Edit(
        "waves = torch.cat([torch.cos(angles), torch.sin(angles)], 1)",
        "waves = torch.cat([torch.sin(angles), torch.cos(angles)], 1)",
        reference=("embedded = torch.cat([angles.cos(), angles.sin()], -1)",),
        at=('return self.linear(waves, "time")',),
    ),
    "rectified_scale_without_one": Edit(
        "inner = inner + inner * scale + shift",
        "inner = inner * scale + shift",
        reference=(
            "return F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale[:, None])",
            "inner = self.up(modulate(x, shift_mlp, scale_mlp))",
        ),
    ),
    "rectified_patch_rows_and_columns_exchanged": Edit(
        "rows = self.final_weight.view(PATCH, PATCH, COLOURS, WIDTH).permute(2, 0, 1, 3)",
        "rows = self.final_weight.view(PATCH, PATCH, COLOURS, WIDTH).permute(2, 1, 0, 3)",
        reference=(
            'return torch.einsum("nhwpqc->nchpwq", patches).reshape(x.shape)',
            "patches = self.final(modulate(image, shift, scale))",
        ),
        at=("return image @ rows.reshape(-1, WIDTH).T + self.final_bias",),
    ),
    "rectified_deviation_over_tokens_only": Edit(
        "ratio = given.std((1, 2), keepdim=True) / steered.std((1, 2), keepdim=True)",
        "ratio = given.std(1, keepdim=True) / steered.std(1, keepdim=True)",
        reference=("ratio = conditional.std((1, 2, 3), keepdim=True)",),
    ),
    "rectified_second_slope_at_the_old_time": Edit(
        "second = velocity(patches + size * slope, index + 1)",
        "second = velocity(patches + size * slope, index)",
        reference=(
            "corrected = guided_velocity(model, ahead, later, words)",
            "angles = 1000 * t[:, None] * FREQUENCIES",
        ),
        at=("without, given = port(patches.repeat(2, 1, 1), clocks[index], both).chunk(2)",),
    ),
    "detr_frozen_shift_without_scale": Edit(
        'self.w(f"bn{i}.bias") - self.w(f"bn{i}.running_mean") * gain',
        'self.w(f"bn{i}.bias") - self.w(f"bn{i}.running_mean")',
        reference=("shift = self.bias - self.running_mean * scale",),
    ),
    "detr_positions_columns_first": Edit(
        "torch.cat([rows, columns], -1)",
        "torch.cat([columns, rows], -1)",
        reference=("torch.cat((pos_y, pos_x), dim=3)",),
    ),
    "detr_positions_on_values": Edit(
        "qkv[..., : 2 * WIDTH] += F.linear(places, weight[: 2 * WIDTH])",
        "qkv += F.linear(places, weight)",
        reference=("self.self_attn(q, k, value=tgt)",),
    ),
    "detr_padding_unmasked_in_cross_attention": Edit(
        "self.cross(x, slots, memory, pixels, padding,",
        "self.cross(x, slots, memory, pixels, None,",
        reference=("self.multihead_attn(q, k, value=memory, key_padding_mask=mask)",),
        at=("return x + self.mix(q, k, v, padding, *name)", "if padding is not None:"),
    ),
    "detr_corners_by_whole_extent": Edit(
        "[center - extent / 2, center + extent / 2]",
        "[center, center + extent]",
        reference=("corners = [cx - 0.5 * w",),
    ),
    "videovae_cache_keeps_oldest_frames": Edit(
        "cache[name] = window[stride - 3 :]",
        "cache[name] = window[: 3 - stride]",
        reference=("x = torch.cat([first, x], dim=2)",),
        at=("window = torch.cat([cache.get(name, start), x])",),
    ),
    "videovae_norm_over_time": Edit(
        "flat = F.group_norm(x.flatten(0, 1), GROUPS, weight, bias, 1e-6)",
        """flat = F.group_norm(x.movedim(0, 2), GROUPS, weight, bias, 1e-6)
        flat = flat.movedim(2, 0).contiguous()""",
        reference=("normed = self.norm(frames.flatten(0, 1))",),
    ),
    "videovae_mask_without_past": Edit(
        ".tril(past.shape[-2])",
        ".tril()",
        reference=("F.scaled_dot_product_attention(q, k, v, is_causal=True)",),
        at=(".masked_fill(~seen, -torch.inf)",),
    ),
    "videovae_last_frame_not_doubled": Edit(
        ".repeat_interleave(2, 0)[1:]",
        ".repeat_interleave(2, 0)[:-1]",
        reference=(
            "rest = F.interpolate(x[:, :, 1:], scale_factor=(2.0, 1.0, 1.0)",
            "x = torch.cat([x[:, :, :1], rest], dim=2)",
        ),
        at=("x = x.repeat_interleave(2, -2)",),
    ),
    "videovae_variance_as_deviation": Edit(
        "(logvar / 2).exp()",
        "logvar.exp()",
        reference=("std = torch.exp(0.5 * logvar)",),
    ),
    "contrast_slow_towers_too_fast": Edit(
        "slow.mul_(KEEP).add_(fast, alpha=1 - KEEP)",
        "slow.mul_(1 - KEEP).add_(fast, alpha=KEEP)",
        reference=("param_m.data = param_m.data * KEEP",),
    ),
    "contrast_negatives_of_own_tower": Edit(
        "torch.cat([keys, queue], 1).flip(0)",
        "torch.cat([keys.flip(0), queue], 1)",
        reference=(
            "image_all = torch.cat([image_keys.T",
            "text_all = torch.cat([text_keys.T",
        ),
    ),
    "contrast_pointer_by_one": Edit(
        "(pointer + BATCH) % QUEUE",
        "(pointer + 1) % QUEUE",
        reference=("self.queue_ptr = (ptr + size) % QUEUE",),
        at=("queue[:, pointer : pointer + BATCH] = keys",),
    ),
    "contrast_decay_of_biases": Edit(
        "if w.dim() > 2 else g",
        "if w.dim() > 1 else g",
        reference=(
            '"weight_decay": DECAY',
            '"weight_decay": 0.0',
            "optimizer = torch.optim.SGD(",
            "optimizer.step()",
        ),
    ),
    "contrast_average_counts_from_one": Edit(
        "share = 1 - min(0.999, (1 + step) / (10 + step))",
        "share = 1 - min(0.999, (2 + step) / (11 + step))",
        reference=(
            "decay = min(0.999, (1 + step) / (10 + step))",
            "averaged.copy_(decay * averaged",
        ),
        at=("average.lerp_(w, share)",),
    ),
    "ppo_episode_ends_one_early": Edit(
        "episode = dones.cumsum(1) - dones",
        "episode = dones.cumsum(1)",
        reference=("lastgaelam = delta + GAMMA", "nextnonterminal = 1.0 - dones[t]"),
        at=("together = episode[:, :, None]", 'torch.einsum("nts,ns->nt"'),
    ),
    "ppo_advantages_environments_first": Edit(
        "gains = estimate(rollout).T.reshape(-1)",
        "gains = estimate(rollout).reshape(-1)",
        reference=("b_advantages, b_returns = advantages.reshape(-1)",),
        at=("targets = gains + guesses", "gain = gains[chosen] - gains[chosen].mean()"),
    ),
    "ppo_value_clipped_around_target": Edit(
        "near = guess + (value[:, 0] - guess).clamp(-CLIP, CLIP)",
        "near = target + (value[:, 0] - target).clamp(-CLIP, CLIP)",
        reference=("v_clipped = b_values[mb_inds]",),
    ),
    "ppo_gradients_clipped_one_by_one": Edit(
        "[g * shrink for g in gradients]",
        "[g * min(1.0, MAX_NORM / (g.norm().item() + 1e-6)) for g in gradients]",
        reference=("nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)",),
    ),
    "ppo_second_moment_uncorrected": Edit(
        "root = (s / (1 - 0.999**count)).sqrt()",
        "root = s.sqrt()",
        reference=("optimizer.step()",),
    ),
}

LEGAL = {
    "mla_two_chunks": Edit(
        "for stop in range(PREFIX, length + 1):",
        "for stop in (PREFIX, length):",
    ),
    "mla_keys_turned_by_a_roll": Edit(
        "keys[:, start:stop] = key * cos + torch.cat([-key[..., 2:], key[..., :2]], -1) * sin",
        "keys[:, start:stop] = torch.addcmul(\n"
        "            key * cos, key.roll(2, -1), sin * torch.tensor([-1.0, -1.0, 1.0, 1.0])\n"
        "        )",
    ),
    "swin_gathered_back": Edit(
        "back = torch.zeros_like(x)\n"
        '        back[:, :, index.flatten()] = self.dense(mixed.flatten(2), *name, "attn.proj")',
        "back = mixed.flatten(2)[:, :, index.flatten().argsort()]\n"
        '        back = self.dense(back, *name, "attn.proj")',
    ),
    "swin_mask_added": Edit(
        "scores = scores.masked_fill(apart, -torch.inf)",
        "scores = scores - 1000.0 * apart",
    ),
    "whisper_newest_first": Edit("torch.cat([a, b], 2)", "torch.cat([b, a], 2)"),
    "convnext_energies_of_flat_maps": Edit(
        "energy = y.square().sum((1, 2), keepdim=True).sqrt()",
        "energy = torch.linalg.vector_norm(y.flatten(1, 2), dim=1)[:, None, None]",
    ),
    "hyena_toeplitz_by_shifts": Edit(
        'long = torch.einsum("cts,bsc->btc", toeplitz, v)',
        "long = sum(\n"
        "            F.pad(v, (0, 0, s, 0))[:, :length] * taps[0][:, s] for s in range(length)\n"
        "        )",
    ),
    "flow_triangular_determinant": Edit(
        "cost = cost - PIXELS * torch.linalg.slogdet(matrix).logabsdet",
        'logs = self.w("layers", 4 * step, "logs") + self.w("layers", 4 * step + 1, "log_s")\n'
        "            cost = torch.sub(cost, logs.sum(), alpha=PIXELS)",
    ),
    "flow_gate_by_sigmoid": Edit(
        "changed = torch.exp(-squeeze) * (changed + shift)",
        "gate = torch.sigmoid(raw + 2.0)\n"
        "            changed = torch.addcmul(shift * gate, changed, gate)",
    ),
    "lora_loss_over_chosen_rows": Edit(
        "return (surprise * known).sum() / known.sum()",
        "return surprise[known].mean()",
    ),
    "rectified_attention_by_the_library": Edit(
        'mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)',
        "q, k, v = (t.transpose(1, 2) for t in (q, k, v))\n"
        "            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)",
    ),
    "rectified_heun_from_the_predicted_point": Edit(
        "slope = 0.5 * slope + 0.5 * second",
        "slope = slope + (second - slope) / 2",
    ),
    "detr_library_attention": Edit(
        'mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)',
        """keep = None if padding is None else ~padding[:, None, None]
        heads = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=keep).transpose(1, 2)""",
    ),
    "detr_corners_by_matrix": Edit(
        "corners = torch.cat([center - extent / 2, center + extent / 2], -1)",
        """turn = torch.tensor([[1.0, 1.0], [-0.5, 0.5]])
        pairs = torch.stack([center, extent], -1) @ turn
        corners = pairs.mT.flatten(-2)""",
    ),
    "videovae_norm_by_hand": Edit(
        "flat = F.group_norm(x.flatten(0, 1), GROUPS, weight, bias, 1e-6)",
        """grouped = x.unflatten(2, (GROUPS, -1))
        var, mean = torch.var_mean(grouped, (3, 4, 5), correction=0, keepdim=True)
        flat = ((grouped - mean) * (var + 1e-6).rsqrt()).flatten(2, 3)
        flat = flat * weight[:, None, None] + bias[:, None, None]""",
    ),
    "contrast_library_loss": Edit(
        "loss = (logits.logsumexp(-1) - logits.diagonal(dim1=1, dim2=2)).mean()",
        """answers = torch.arange(BATCH).repeat(2)
        loss = F.cross_entropy(logits.flatten(0, 1), answers)""",
    ),
    "contrast_two_products": Edit(
        'logits = torch.einsum("tbd,tkd->tbk", queries, candidates)',
        """batch_part = queries @ keys.flip(0).mT
        logits = torch.cat([batch_part, queries @ queue.flip(0).mT], -1)""",
    ),
    "ppo_entropy_by_logsumexp": Edit(
        "entropy = -(logs.exp() * logs).sum(-1).mean()",
        "entropy = (logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)).mean()",
    ),
}
