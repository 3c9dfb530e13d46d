"""The faults of the fifth families, written without sight of the comparison, and legal edits."""

from __future__ import annotations

from tests.corpora.unseen.programs import Edit

FAULTS = {
    "paged_norms_left_in_the_order_of_halves": Edit(
        'scales = [self.w(name, f"{part}_norm.weight")[order] for part in "qk"]',
        'scales = [self.w(name, f"{part}_norm.weight") for part in "qk"]',
        reference=("q, k = apply_rotary(self.q_norm(q)",),
        at=(
            "scales = torch.stack(",
            "self.layers.append((",
            "heads = F.rms_norm(",
        ),
    ),
    "paged_blocks_freed_as_their_first_key_leaves": Edit(
        "while (passed[r] + 1) * BLOCK <= start - WINDOW + 1:",
        "while passed[r] * BLOCK < start - WINDOW + 1:",
        reference=("mask = (distance >= 0)", "scores = (q @ k.transpose("),
        at=(
            "free.append(tables[r].pop(0))",
            "passed[r] += 1",
            "own, table = torch.arange(start, stop)",
            "group, gap = torch.arange(HEADS)",
            'scores = torch.einsum("qhd,khd->hqk"',
        ),
    ),
    "paged_rotary_counts_from_the_first_block_kept": Edit(
        "places.append(own + passed[r] * BLOCK)",
        "places.append(own)",
        reference=(
            "position_ids = (attention_mask",
            "freqs = position_ids[",
            "q, k = apply_rotary(self.q_norm(q)",
        ),
        at=("angles = places[:", "turn = torch.polar(", "heads = torch.view_as_complex("),
    ),
    "paged_queries_dealt_out_among_the_keys": Edit(
        "torch.arange(HEADS) // (HEADS // KV)",
        "torch.arange(HEADS) % KV",
        reference=("k, v = (t.repeat_interleave(",),
        at=('scores = torch.einsum("qhd,khd->hqk"', 'return torch.einsum("hqk,khd->qhd"'),
    ),
    "paged_sink_scaled_as_a_score": Edit(
        'sink = self.w("layers", i, "sinks")[:, None, None]',
        'sink = self.w("layers", i, "sinks")[:, None, None] / DIM**0.5',
        reference=("sinks = self.sinks.reshape(", "probs = torch.cat([scores, sinks]"),
        at=("top = scores.amax(", "share = share / ("),
    ),
    "wgan_slopes_measured_for_each_pixel": Edit(
        "steepness = slopes.square().sum((1, 2, 3)).sqrt()",
        "steepness = slopes.square().sum(3).sqrt()",
        reference=("return ((gradients.flatten(1)",),
        at=("return gap + PENALTY",),
    ),
    "wgan_statistics_of_the_critics_fakes_lost": Edit(
        "fake, stats = paint(painter, stats, noises[i, j])",
        "fake, _ = paint(painter, stats, noises[i, j])",
        reference=(
            "fake = generator(noises[i, j]).detach()",
            "x = F.relu(self.bn(self.up(x)))",
            "images = generator(noises[0, 0])",
        ),
        at=(
            "stats = [torch.lerp(old, new",
            "mean, variance = stats",
            'scale = w["bn.weight"]',
            "images, _ = paint(painter, stats",
        ),
    ),
    "wgan_one_count_of_steps_for_both": Edit(
        "painter = step(painter, slopes, memories[0], i + 1, RATE_G)",
        "painter = step(painter, slopes, memories[0], (i + 1) * (CRITICS + 1), RATE_G)",
        reference=("optimizer_g.step()",),
        at=("root = (second", "weights = weights | {name"),
    ),
    "wgan_critic_bound_when_the_function_was_made": Edit(
        "def convince(painter, stats, noise):",
        "def convince(painter, stats, noise, critic=critic):",
        reference=("g_loss = -discriminator(generator(",),
        at=("return -judge_all(critic, images)",),
    ),
    "wgan_penalty_without_slope_of_its_own": Edit(
        "slopes = tilt(critic, torch.lerp(fake, real, share))",
        "slopes = tilt({k: v.detach() for k, v in critic.items()}, torch.lerp(fake, real, share))",
        reference=(
            "gradients = torch.autograd.grad(scores",
            "return ((gradients.flatten(1)",
            "d_loss.backward()",
        ),
        at=(
            "steepness = slopes.square()",
            "return gap + PENALTY",
            "slopes, loss = grad_and_value(distrust)(",
        ),
    ),
    "fastspeech_durations_one_too_long": Edit(
        "ends = spans[:, 0].expm1().round()",
        "ends = spans[:, 0].exp().round()",
        reference=("duration = torch.clamp(", "x = [row.repeat_interleave("),
        at=("frames = torch.arange(min(", "x = self.block(said["),
    ),
    "fastspeech_sines_before_cosines": Edit(
        "torch.stack([phases.sin(), phases.cos()], -1).flatten(1)",
        "torch.cat([phases.sin(), phases.cos()], 1)",
        reference=(
            "return torch.where(hid % 2 == 0",
            "x = self.emb(phones) + ",
            "x = self.decoder(x + ",
        ),
    ),
    "fastspeech_first_frame_given_to_the_phoneme_before": Edit(
        "torch.searchsorted(ends, frames, right=True)",
        "torch.searchsorted(ends, frames)",
        reference=("x = [row.repeat_interleave(",),
    ),
    "fastspeech_durations_guessed_with_the_pitch": Edit(
        """spans, pitch = self.guess(said, "duration"), self.guess(said, "pitch")
        said = said + self.dense(pitch, "pitch_emb")""",
        """pitch = self.guess(said, "pitch")
        said = said + self.dense(pitch, "pitch_emb")
        spans = self.guess(said, "duration")""",
        reference=("log_d, pitch = self.duration(", "x = x + self.pitch_emb("),
        at=('x = self.norm(self.dense(x, f"{part}.conv")',),
    ),
    "fastspeech_folded_norm_forgets_the_bias": Edit(
        "shift = bn.bias + (conv.bias - bn.running_mean) * scale",
        "shift = bn.bias - bn.running_mean * scale",
        reference=("y = torch.tanh(self.post_bns[0]", "y = self.post_bns[1]("),
        at=("self.post.append((", "better = mel + ", "return taps.unfold("),
    ),
    "pixart_masks_in_another_order_than_texts": Edit(
        "hidden = torch.stack([words, others], 1).flatten(0, 1)[:, None, None].log()",
        "hidden = torch.cat([words, others])[:, None, None].log()",
        reference=("y, mask = torch.cat([negative", "x = x + self.cross_proj("),
        at=('return torch.einsum("nhqk,nkhd->nqhd"', 'y = self.attend(self.dense(x, "blocks", b'),
    ),
    "pixart_places_of_rows_before_columns": Edit(
        "torch.cat([along, down], -1)",
        "torch.cat([down, along], -1)",
        reference=(
            "grid = torch.meshgrid(",
            "halves = [torch.outer(",
            "return torch.cat([torch.cat([half.sin()",
            "x = self.x_embedder(x)",
        ),
        at=("x = self.dense(x.flatten(1, 2).flatten(2)",),
    ),
    "pixart_channels_of_a_patch_read_first": Edit(
        "x = x.unflatten(2, (PATCH, PATCH, 2, CHANNELS))[..., 0, :].unflatten(",
        "x = x.unflatten(2, (2, CHANNELS, PATCH, PATCH))[:, :, 0].movedim(2, 4).unflatten(",
        reference=("x = x.reshape(len(x), ROWS", 'return torch.einsum("nhwpqc->nchpwq"'),
        at=("return x.transpose(2, 3).flatten(3, 4)",),
    ),
    "pixart_sample_kept_as_without_fresh_noise": Edit(
        "((1 - then) / (1 - now) * odds) ** 0.5",
        "((1 - then) / (1 - now)) ** 0.5",
        reference=("x_t = (self.sigma_t[i + 1] / self",),
        at=("rows.append((now**-0.5", "x = keep * x + near"),
    ),
    "pixart_memory_of_noise_and_not_of_pictures": Edit(
        "old = clean\n",
        "old = noise\n",
        reference=("m1, m0 = self.model_outputs", "x_t = x_t + 0.5 * gain"),
        at=("x = keep * x + near",),
    ),
    "jointvideo_windows_of_strided_pixels": Edit(
        "y = y.unflatten(3, (-1, WINDOW[1])).unflatten(2, (-1, WINDOW[0]))\n"
        "            y = y.permute(6, 0, 1, 2, 4, 7, 3, 5, 8).flatten(6, 7)\n"
        "            y = F.scaled_dot_product_attention(*y).unflatten(-2, WINDOW)\n"
        "            y = y.permute(0, 1, 2, 5, 3, 6, 4, 7).reshape(x.shape)",
        "y = y.unflatten(3, (WINDOW[1], -1)).unflatten(2, (WINDOW[0], -1))\n"
        "            y = y.permute(6, 0, 1, 3, 5, 7, 2, 4, 8).flatten(6, 7)\n"
        "            y = F.scaled_dot_product_attention(*y).unflatten(-2, WINDOW)\n"
        "            y = y.permute(0, 1, 5, 2, 6, 3, 4, 7).reshape(x.shape)",
        reference=(
            "cell, pixel = torch.stack(",
            "window_mask = (cell",
            "x = x + self.spatial.out(",
        ),
        at=('x = x + self.out(y, f"{name}.spatial")',),
    ),
    "jointvideo_gains_of_heads_not_sorted": Edit(
        "eps=1e-6) * gains[:, None, self.order]",
        "eps=1e-6) * gains[:, None]",
        reference=("self.norm_q(q), self.norm_k(k), v))",),
        at=("qk = torch.complex(",),
    ),
    "jointvideo_rates_run_on_over_the_axes": Edit(
        "torch.cat([THETA ** -(torch.arange(n // 2) * 2 / n) for n in AXES])",
        "THETA ** -(torch.arange(DIM // 2) * 2 / DIM)",
        reference=("freqs = 1.0 / THETA", "angles = step * place", "out.append(part * angles"),
        at=("angles = torch.cartesian_prod(", "turns = torch.polar("),
    ),
    "jointvideo_words_masked_as_if_they_came_first": Edit(
        "F.pad(known, (len(angles), 0), value=True)",
        "F.pad(known, (0, len(angles)), value=True)",
        reference=("joint_mask = F.pad(", "mixed = attention(q, k, v, joint_mask)"),
        at=("y = F.scaled_dot_product_attention(*y, attn_mask=seen)",),
    ),
    "jointvideo_past_of_the_map_before_the_windows": Edit(
        """x = x + self.out(y, f"{name}.spatial")
            y = self.heads(F.layer_norm(x, (WIDTH,)), f"{name}.temporal", turns)""",
        """near = self.out(y, f"{name}.spatial")
            y = self.heads(F.layer_norm(x, (WIDTH,)), f"{name}.temporal", turns)
            x = x + near""",
        reference=("x = x + self.spatial.out(", "past = self.temporal.heads("),
    ),
    "intlinear_nibbles_read_as_neighbours": Edit(
        "codes = torch.cat([self.bytes & 15, self.bytes >> 4], 1).int()",
        "codes = torch.stack([self.bytes & 15, self.bytes >> 4], 2).flatten(1, 2).int()",
        reference=(
            "zeros, codes = unpack(",
            "weight = self.scales[self.g_idx]",
            "return x @ weight",
        ),
        at=("sums = torch.bmm(",),
    ),
    "intlinear_zero_points_as_they_are_kept": Edit(
        "unpack(layer.qzeros) + 1",
        "unpack(layer.qzeros)",
        reference=(
            "zeros, codes = unpack(",
            "weight = self.scales[self.g_idx]",
            "return x @ weight",
        ),
        at=("sums = torch.bmm(",),
    ),
    "intlinear_gate_reads_the_smoothed": Edit(
        "gate(y * block.up_proj.smooth)",
        "gate(y)",
        reference=("return x + self.down_proj(",),
        at=("step = x.abs().amax(1", "x = (x / step).round().int()"),
    ),
    "intlinear_sums_in_sixteen_bits": Edit(
        "sums = codes.int() @ weight.T.int() - zero",
        "sums = codes.short() @ weight.T.short() - zero",
        reference=("return F.linear(x, self",),
        at=("return sums * (layer.input_scale",),
    ),
    "intlinear_bias_added_before_the_scales": Edit(
        "y = sums * step * self.head.weight_scale[:, 0] + self.head.bias",
        "y = (sums + self.head.bias) * step * self.head.weight_scale[:, 0]",
        reference=("return x @ (self.weight",),
    ),
    "vlm_steps_without_the_jump_of_the_picture": Edit(
        "places = (counts + step + extents - areas).expand(3, -1)",
        "places = (counts + step).expand(3, -1)",
        reference=(
            "text = torch.arange(len(ids)",
            "position_ids[:, i, attention_mask[i]] =",
            "freqs = positions[",
            "q, k = apply_rope(",
        ),
        at=("said.append(", "angles = angles * THETA", "turns, slots = "),
    ),
    "vlm_corners_merged_column_by_column": Edit(
        "y = x.view(-1, MERGE**2 * WIDTH)",
        "y = x.view(-1, MERGE, MERGE, WIDTH).transpose(1, 2).flatten(1)",
        reference=(
            "x = x.reshape(n, h, w // MERGE",
            "x = x.reshape(n, w // MERGE",
            "return F.gelu(self.project(",
        ),
        at=("y = F.layer_norm(y, y.shape[1:]",),
    ),
    "vlm_patches_see_the_other_picture": Edit(
        "attn_mask=owner[:, None] == owner",
        "attn_mask=None",
        reference=("features = torch.cat([", "weights = (qkv[0] @", "x = x + self.proj("),
    ),
    "vlm_text_goes_on_after_the_rows_of_the_picture": Edit(
        "sizes.amax(1), sizes.prod(1)",
        "sizes[:, 0], sizes.prod(1)",
        reference=(
            "text = torch.arange(len(ids)",
            "position_ids[:, i, attention_mask[i]] =",
            "freqs = positions[",
        ),
        at=(
            "places = orders - passed",
            "places = (counts + step",
            "angles = angles * THETA",
        ),
    ),
    "vlm_steps_kept_behind_the_longest_prompt": Edit(
        "self.read(x, places, everyone, counts + step)",
        "self.read(x, places, everyone, counts.amax() + step + 0 * counts)",
        reference=(
            "seen = torch.ones(",
            "mask = torch.zeros(",
            "weights = (q @ k",
            "k, v = (t.repeat_interleave(",
        ),
        at=(
            "seen = (slots // MOST",
            "self.cache[i][:,",
            "scores = torch.einsum(",
            "shares = scores.masked_fill(",
        ),
    ),
    "finetune_each_text_weighs_the_same": Edit(
        "loss = -torch.lerp(exact, logs.mean(1).sum(), SMOOTHING) / count",
        "loss = -torch.lerp(exact, logs.mean(1).sum(), SMOOTHING) / len(logs) / len(texts)",
        reference=("loss = F.cross_entropy(", "num_items, total ="),
        at=("gradient, total = gradient +",),
    ),
    "finetune_smoothing_over_the_other_words_alone": Edit(
        "torch.lerp(exact, logs.mean(1).sum(), SMOOTHING) /",
        "torch.lerp(exact, (logs.sum() - exact) / (VOCAB - 1), SMOOTHING) /",
        reference=("loss = F.cross_entropy(", 'given = {"reduction"'),
        at=("gradient, total = gradient +",),
    ),
    "finetune_decay_at_the_peak_rate": Edit(
        "self.theta = self.theta - rate * (move + self.decay * self.theta)",
        "self.theta = self.theta - rate * move - RATE * self.decay * self.theta",
        reference=("optimizer.step()", "optimizer = torch.optim.AdamW("),
    ),
    "finetune_schedule_counts_the_texts": Edit(
        "after = max(index - WARMUP, 0) / (TOTAL - WARMUP)\n"
        "        warm = min((index + 1) / (WARMUP + 1), 1)",
        "seen = index * PARTS\n"
        "        after = min(max(seen - WARMUP, 0) / (TOTAL - WARMUP), 1)\n"
        "        warm = min((seen + 1) / (WARMUP + 1), 1)",
        reference=("scheduler.step()", "return FLOOR +", "return (step + 1) /", "optimizer.step()"),
        at=("rate = RATE * warm", "state.step("),
    ),
    "finetune_end_of_text_taken_for_padding": Edit(
        "answers = [goal[1:] != IGNORED for goal in goals]",
        "answers = [(g[1:] != IGNORED) & (t[1:] != EOS) for t, g in zip(texts, goals, strict=True)]",
        reference=("num_items, total =", "loss = F.cross_entropy(", "ids, labels = ("),
        at=("count = sum(kept", "logs, wanted = likelihoods("),
    ),
}

LEGAL = {
    "paged_one_block_after_another": Edit(
        """group, gap = torch.arange(HEADS) // (HEADS // KV), own[:, None] - torch.arange(len(keys))
        scores = torch.einsum("qhd,khd->hqk", q, keys[:, group]) / DIM**0.5
        scores = scores.masked_fill((gap < 0) | (gap >= WINDOW), -torch.inf)
        top = scores.amax(-1, keepdim=True).maximum(sink)
        share = (scores - top).exp()
        share = share / (share.sum(-1, keepdim=True) + (sink - top).exp())
        return torch.einsum("hqk,khd->qhd", share, values[:, group]).flatten(1)""",
        """group = torch.arange(HEADS) // (HEADS // KV)
        top, total, mixed = sink, torch.ones(()), torch.zeros(())
        for at in range(0, len(keys), BLOCK):
            gap = own[:, None] - torch.arange(at, at + BLOCK)
            scores = torch.einsum("qhd,khd->hqk", q, keys[at : at + BLOCK, group]) / DIM**0.5
            scores = scores.masked_fill((gap < 0) | (gap >= WINDOW), -torch.inf)
            peak = scores.amax(-1, keepdim=True).maximum(top)
            share, fade, top = (scores - peak).exp(), (top - peak).exp(), peak
            total = total * fade + share.sum(-1, keepdim=True)
            mixed = mixed * fade + share @ values[at : at + BLOCK, group].transpose(0, 1)
        return (mixed / total).transpose(0, 1).flatten(1)""",
    ),
    "paged_sink_as_an_empty_key_of_the_library": Edit(
        """scores = torch.einsum("qhd,khd->hqk", q, keys[:, group]) / DIM**0.5
        scores = scores.masked_fill((gap < 0) | (gap >= WINDOW), -torch.inf)
        top = scores.amax(-1, keepdim=True).maximum(sink)
        share = (scores - top).exp()
        share = share / (share.sum(-1, keepdim=True) + (sink - top).exp())
        return torch.einsum("hqk,khd->qhd", share, values[:, group]).flatten(1)""",
        """k, v = (F.pad(t[:, group].transpose(0, 1), (0, 0, 0, 1)) for t in (keys, values))
        bias = ((gap >= 0) & (gap < WINDOW)).log().expand(HEADS, -1, -1)
        bias = torch.cat([bias, sink.expand(-1, len(own), 1)], -1)
        mixed = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=bias)
        return mixed.transpose(0, 1).flatten(1)""",
    ),
    "paged_three_tokens_a_step": Edit(
        "(1 if read[r] else PROMPT)",
        "3",
    ),
    "wgan_fakes_and_reals_judged_together": Edit(
        "gap = judge_all(critic, fake).mean() - judge_all(critic, real).mean()",
        """made, found = judge_all(critic, torch.cat([fake, real])).chunk(2)
    gap = (made - found).mean()""",
    ),
    "wgan_rate_corrected_and_not_the_moments": Edit(
        """root = (second / (1 - BETAS[1] ** count)).sqrt() + 1e-8
        weights = weights | {name: weights[name] - rate / (1 - BETAS[0] ** count) * first / root}""",
        """turn = (1 - BETAS[1] ** count) ** 0.5
        change = first / (second.sqrt() + 1e-8 * turn)
        weights = weights | {name: weights[name] - rate * turn / (1 - BETAS[0] ** count) * change}""",
    ),
    "wgan_enlarged_by_the_library": Edit(
        """x = torch.einsum("nchw,coij->nhiwjo", x, w["up.weight"]).flatten(3, 4).flatten(1, 2)""",
        """x = F.conv_transpose2d(x, w["up.weight"], stride=2).permute(0, 2, 3, 1)""",
    ),
    "fastspeech_frames_by_a_matrix_of_ones": Edit(
        """x = self.block(said[torch.searchsorted(ends, frames, right=True)], "decoder")""",
        """path = F.one_hot((frames[:, None] >= ends).sum(1), len(ends)).to(said.dtype)
        x = self.block(path @ said, "decoder")""",
    ),
    "fastspeech_filters_by_the_library": Edit(
        """taps = F.pad(x, (0, 0, kernel.shape[2] // 2, kernel.shape[2] // 2))
        return taps.unfold(0, kernel.shape[2], 1).flatten(1) @ kernel.flatten(1).T + bias""",
        """return F.conv1d(x.T, kernel, bias, padding="same").T""",
    ),
    "fastspeech_heads_by_the_library": Edit(
        """share = (torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", share, v).flatten(1)""",
        """q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)""",
    ),
    "pixart_with_and_without_prompt_apart": Edit(
        """noise = self.noise(x.repeat_interleave(2, 0), i, memory, hidden)
            noise = torch.lerp(noise[1::2], noise[::2], GUIDANCE)""",
        """halves = ([[t[h::2] for t in words] for words in memory] for h in (0, 1))
            told, free = (self.noise(x, i, m, hidden[h::2]) for h, m in enumerate(halves))
            noise = GUIDANCE * told - (GUIDANCE - 1) * free""",
    ),
    "pixart_heads_by_the_library": Edit(
        """q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in (q, k, v))
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(WIDTH // HEADS)
        return torch.einsum("nhqk,nkhd->nqhd", (scores + hidden).softmax(-1), v).flatten(2)""",
        """q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        hidden = None if isinstance(hidden, float) else hidden
        return F.scaled_dot_product_attention(q, k, v, hidden).transpose(1, 2).flatten(2)""",
    ),
    "pixart_patches_by_the_library": Edit(
        """x = x.unflatten(1, (ROWS, PATCH)).unflatten(3, (COLUMNS, PATCH)).permute(0, 1, 3, 5, 2, 4)
        x = self.dense(x.flatten(1, 2).flatten(2), "x_embedder") + self.places""",
        """kernel, bias = self.w("x_embedder.weight"), self.w("x_embedder.bias")
        x = F.conv2d(x.permute(0, 3, 1, 2), kernel, bias, PATCH).flatten(2).mT + self.places""",
    ),
    "jointvideo_windows_by_split_maps": Edit(
        """y = y.unflatten(3, (-1, WINDOW[1])).unflatten(2, (-1, WINDOW[0]))
            y = y.permute(6, 0, 1, 2, 4, 7, 3, 5, 8).flatten(6, 7)
            y = F.scaled_dot_product_attention(*y).unflatten(-2, WINDOW)
            y = y.permute(0, 1, 2, 5, 3, 6, 4, 7).reshape(x.shape)""",
        """rows = [strip.split(WINDOW[1], 3) for strip in y.split(WINDOW[0], 2)]
            tiles = [[t.permute(4, 0, 1, 5, 2, 3, 6).flatten(4, 5) for t in row] for row in rows]
            tiles = [[F.scaled_dot_product_attention(*t).mT for t in row] for row in tiles]
            rows = [torch.cat([t.unflatten(-1, WINDOW) for t in row], -1) for row in tiles]
            y = torch.cat(rows, -2).permute(0, 1, 4, 5, 2, 3).flatten(4)""",
    ),
    "jointvideo_turned_by_real_numbers": Edit(
        """qk = torch.complex(*qk.chunk(2, -1)) * turns
        return torch.cat([torch.cat([qk.real, qk.imag], -1), v], -3)""",
        """turns, (low, high) = torch.as_tensor(turns, dtype=torch.cfloat), qk.chunk(2, -1)
        low, high = low * turns.real - high * turns.imag, low * turns.imag + high * turns.real
        return torch.cat([torch.cat([low, high], -1), v], -3)""",
    ),
    "jointvideo_one_clip_after_another": Edit(
        "y = F.scaled_dot_product_attention(*y, attn_mask=seen).transpose(1, 2).flatten(2)",
        """y = [torch.einsum("hqd,hkd->hqk", q, k).div(DIM**0.5).masked_fill(~s, -torch.inf).softmax(-1) @ v
                 for q, k, v, s in zip(*y, seen, strict=True)]
            y = torch.stack(y).transpose(1, 2).flatten(2)""",
    ),
    "intlinear_zeros_taken_from_the_codes": Edit(
        "sums = torch.bmm(x, codes) - x.sum(2, keepdim=True) * self.zeros[:, None]",
        "sums = torch.bmm(x, codes - self.zeros[:, None])",
    ),
    "intlinear_zero_taken_from_the_inputs": Edit(
        "sums = codes.int() @ weight.T.int() - zero * weight.sum(1, dtype=torch.int32)",
        "sums = torch.einsum('ni,oi->no', codes.int() - zero, weight.int())",
    ),
    "intlinear_head_scaled_before_the_product": Edit(
        """sums = (y / step).to(FP8).float() @ self.columns
        y = sums * step * self.head.weight_scale[:, 0] + self.head.bias""",
        """columns = self.columns * self.head.weight_scale[:, 0]
        y = torch.addmm(self.head.bias, (y / step).to(FP8).float() * step, columns)""",
    ),
    "vlm_one_picture_after_another": Edit(
        "self.look(pictures, sizes))",
        "torch.cat([self.look([p], s[None]) for p, s in zip(pictures, sizes, strict=True)]))",
    ),
    "vlm_attention_by_the_library": Edit(
        """scores = torch.einsum("nghd,sgd->nghs", q.unflatten(1, (KV, -1)), keys) / DIM**0.5
            shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
            mixed = torch.einsum("nghs,sgd->nghd", shares, values).flatten(1)""",
        """q, keys, values = (t.transpose(0, 1) for t in (q, keys, values))
            mixed = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)
            mixed = mixed.transpose(0, 1).flatten(1)""",
    ),
    "vlm_steps_of_one_text_after_another": Edit(
        "said.append(self.read(x, places, everyone, counts + step))",
        """cut = x.split(1), places.split(1, 1), everyone.split(1), (counts + step).split(1)
            said.append(torch.cat([self.read(*given) for given in zip(*cut, strict=True)]))""",
    ),
    "finetune_two_texts_in_one_backward": Edit(
        "gradient, total = gradient + torch.autograd.grad(loss, leaf)[0], total + loss.detach()",
        """total = total + loss
        gradient, total = torch.autograd.grad(total, leaf)[0], total.detach()""",
    ),
    "finetune_moments_by_lerp": Edit(
        """self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2""",
        """self.first = self.first.lerp(gradient, 1 - BETAS[0])
        self.second = self.second.lerp(gradient.square(), 1 - BETAS[1])""",
    ),
    "finetune_smoothed_shares_as_a_goal": Edit(
        """exact = logs.gather(1, wanted[:, None]).sum()
            loss = -torch.lerp(exact, logs.mean(1).sum(), SMOOTHING) / count""",
        """goal = (1 - SMOOTHING) * F.one_hot(wanted, VOCAB) + SMOOTHING / VOCAB
            loss = F.cross_entropy(logs, goal, reduction="sum") / count""",
    ),
}
