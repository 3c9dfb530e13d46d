"""The faults of the fourth families, written without sight of the comparison, and legal edits."""

from __future__ import annotations

from tests.corpora.unseen.programs import Edit

FAULTS = {
    "sam_windows_padded_before_the_norm": Edit(
        """y = self.norm(x, "blocks", i, "norm1")
            y = F.pad(y, (0, 0, 0, 1))[:, cut].flatten(0, 1) if windowed else y""",
        """y = F.pad(x, (0, 0, 0, 1))[:, cut].flatten(0, 1) if windowed else x
            y = self.norm(y, "blocks", i, "norm1")""",
        reference=("x = F.pad(x, (0, 0, 0, PADDED[1]", "y = window_partition(self.norm1(x))"),
    ),
    "sam_tables_of_rows_and_columns_exchanged": Edit(
        """down = self.distances(height, self.w(*name, "rel_pos_h")).repeat_interleave(width, 0)
        along = self.distances(width, self.w(*name, "rel_pos_w")).repeat(height, 1, 1)""",
        """down = self.distances(height, self.w(*name, "rel_pos_w")).repeat_interleave(width, 0)
        along = self.distances(width, self.w(*name, "rel_pos_h")).repeat(height, 1, 1)""",
        reference=("rel_h = torch.einsum(", "rel_w = torch.einsum(", "attn = attn + rel_h"),
        at=("far = torch.einsum(",),
    ),
    "sam_tables_stretched_from_corner_to_corner": Edit(
        "at = (torch.arange(2 * size - 1) + 0.5) * len(table) / (2 * size - 1) - 0.5",
        "at = torch.arange(2 * size - 1) * (len(table) - 1) / (2 * size - 2)",
        reference=("rel_pos = F.interpolate(",),
        at=("near = torch.lerp(table",),
    ),
    "sam_distances_of_scaled_queries": Edit(
        'far = torch.einsum("nhqd,qdk->nhqk", q, torch.cat([down, along], -1))',
        'far = torch.einsum("nhqd,qdk->nhqk", q / DIM**0.5, torch.cat([down, along], -1))',
        reference=("rel_h = torch.einsum(", "rel_w = torch.einsum(", "attn, r_q = (q * DIM"),
        at=("q, marks = torch.cat([q / DIM**0.5, far]",),
    ),
    "sam_last_kernel_turned": Edit(
        '"nchwij,ocij->nhwo"',
        '"nchwij,ocji->nhwo"',
        reference=("return self.neck(", "self.neck = nn.Sequential("),
    ),
    "policy_rates_end_before_the_slowest": Edit(
        "1e-4 ** torch.linspace(0, 1, WAVES // 2)",
        "1e-4 ** (torch.arange(WAVES // 2) / (WAVES // 2))",
        reference=("rates = torch.exp(", "emb = x[:, None] * rates"),
    ),
    "policy_scale_and_shift_exchanged": Edit(
        "scale, shift = self.dense(mood",
        "shift, scale = self.dense(mood",
        reference=("out = embed[:, 0] *", "embed = self.cond_encoder("),
        at=("y = torch.addcmul(shift, scale",),
    ),
    "policy_ratio_of_steps_inverted": Edit(
        "pace = math.log(self.odds[i + 1] / odds) / math.log(odds / self.odds[i - 1])",
        "pace = math.log(odds / self.odds[i - 1]) / math.log(self.odds[i + 1] / odds)",
        reference=("r0 = (self.lambda_t[i]", "x_t = x_t - 0.5 * gain"),
        at=("aim = torch.lerp(before", "x = self.sigmas[i + 1] / self.sigmas[i] * x"),
    ),
    "policy_memory_not_clipped": Edit(
        "aim = clean = clean.clamp(-CLIP, CLIP)",
        "aim = clean.clamp(-CLIP, CLIP)",
        reference=("m1, m0 = self.model_outputs = [", "x_t = x_t - 0.5 * gain"),
        at=(
            "aim = torch.lerp(before",
            "before, share = clean",
            "x = self.sigmas[i + 1] / self.sigmas[i] * x",
        ),
    ),
    "policy_last_step_of_second_order": Edit(
        "if 0 < i < STEPS - 1:\n                pace",
        "if i > 0:\n                pace",
        reference=(
            "x_t = (self.sigma_t[i + 1]",
            "if 0 < i < STEPS - 1:\n            r0",
            "x_t = x_t - 0.5 * gain",
        ),
        at=("aim = torch.lerp(before", "x = self.sigmas[i + 1] / self.sigmas[i] * x"),
    ),
    "deltanet_memory_read_before_it_fades": Edit(
        """memory = memory * keep[:, t, ..., None]
            known = torch.einsum("nghvk,ngk->nghv", memory, key[:, t])""",
        """known = torch.einsum("nghvk,ngk->nghv", memory, key[:, t])
            memory = memory * keep[:, t, ..., None]""",
        reference=(
            "attn = -((k_beta @ key",
            "value, k_cumdecay = attn @ v_beta",
            "v_new = value[:, :, i] - k_cumdecay",
            "outputs.append(",
        ),
        at=("news = strength[:, t]", "memory = memory + news", "said.append("),
    ),
    "deltanet_queries_and_keys_exchanged": Edit(
        "query, key = qk[:, :, 0] / DK**0.5, qk[:, :, 1]",
        "query, key = qk[:, :, 1] / DK**0.5, qk[:, :, 0]",
        reference=(
            "query, key = (part.unflatten(",
            "query, key = (t.repeat_interleave(",
            "tensors = (l2norm(query)",
        ),
        at=('known = torch.einsum("nghvk', "memory = memory + news", "said.append("),
    ),
    "deltanet_norm_without_the_one": Edit(
        '1 + self.w(*name, "weight"), EPS)',
        'self.w(*name, "weight"), EPS)',
        reference=("return x * torch.rsqrt(x.pow(2)",),
    ),
    "deltanet_gated_before_the_norm": Edit(
        """said = F.rms_norm(torch.stack(said, 1), (DV,), self.w(*name, "norm.weight"), EPS)
        return (said.flatten(2) * F.silu(z))""",
        """said = torch.stack(said, 1).flatten(2) * F.silu(z)
        said = said.unflatten(2, (KEYS, -1, DV))
        said = F.rms_norm(said, (DV,), self.w(*name, "norm.weight"), EPS)
        return said.flatten(2)""",
        reference=("return self.out_proj((self.norm(core)",),
    ),
    "deltanet_bias_past_the_softplus": Edit(
        'decay = F.softplus(rate + self.w(*name, "dt_bias"))',
        'decay = (F.softplus(rate) + self.w(*name, "dt_bias"))',
        reference=("g = -self.A_log.exp()",),
    ),
    "hifigan_last_slope_as_the_others": Edit(
        'F.leaky_relu(x), "conv_post")',
        'F.leaky_relu(x, SLOPE), "conv_post")',
        reference=("x = self.conv_post(F.leaky_relu(x))",),
    ),
    "hifigan_transposed_kernels_normed_over_inputs": Edit(
        "length = direction.square().sum((1, 2), keepdim=True).sqrt()",
        """summed = (0, 2) if name.startswith("ups") else (1, 2)
            length = direction.square().sum(summed, keepdim=True).sqrt()""",
        reference=("x = up(F.leaky_relu(x, SLOPE))", "self.ups.append(weight_norm(up))"),
        at=("self.kernel[name] = direction", "spread = torch.einsum("),
    ),
    "hifigan_blocks_summed": Edit(
        "for j in blocks]).mean(0)",
        "for j in blocks]).sum(0)",
        reference=("x = xs / len(RES_SIZES)",),
    ),
    "hifigan_second_filter_dilated_too": Edit(
        'f"{name}.convs2.{i}")',
        'f"{name}.convs2.{i}", gap)',
        reference=("xt = c2(F.leaky_relu(xt, SLOPE))", "self.convs2 = nn.ModuleList("),
        at=("x, frames = F.pad(x", "taps = [x[:, j", "return torch.cat(taps, -1)"),
    ),
    "hifigan_cropped_one_sample_early": Edit(
        "crop = (size - rate) // 2",
        "crop = (size - rate) // 2 - 1",
        reference=("x = up(F.leaky_relu(x, SLOPE))", "up = nn.ConvTranspose1d("),
        at=("return total[:, crop",),
    ),
    "modernbert_window_twice_as_wide": Edit(
        "(steps.abs() <= NEAR // 2)",
        "(steps.abs() <= NEAR)",
        reference=(
            "far = (rows[None",
            "sliding_window_mask = a",
            "weights = weights + ",
        ),
        at=("share = scores.masked_fill(",),
    ),
    "modernbert_rates_exchanged": Edit(
        "[[GLOBAL_THETA], [LOCAL_THETA]]",
        "[[LOCAL_THETA], [GLOBAL_THETA]]",
        reference=(
            "theta = LOCAL_THETA if self.local",
            "inv_freq = 1.0 / (theta",
            "freqs = torch.arange(",
            "emb = torch.cat((freqs",
        ),
        at=("angles = (places - starts", "cos, sin = angles.cos()"),
    ),
    "modernbert_gate_and_value_exchanged": Edit(
        "value, gate = wide",
        "gate, value = wide",
        reference=("inputs, gate = self.Wi(", "return x + self.mlp_Wo("),
        at=("x = x + (gate * F.gelu(value))",),
    ),
    "modernbert_near_words_of_other_sentences_seen": Edit(
        "close = same & (steps",
        "close = (steps",
        reference=(
            "attention_mask = (1.0",
            "sliding_window_mask = a",
            "weights = weights + ",
        ),
        at=("share = scores.masked_fill(",),
    ),
    "modernbert_first_layer_normed_too": Edit(
        '"attn_norm") if i else x',
        '"attn_norm") if i else F.layer_norm(x, (WIDTH,))',
        reference=("x = x + self.attn(self.attn_norm(x)", "self.attn_norm = nn.LayerNorm("),
    ),
    "tagger_gates_in_another_order": Edit(
        "enter, forget, new, leave =",
        "enter, forget, leave, new =",
        reference=("emissions = 3 * self.hidden2tag(",),
        at=("cell = forget.sigmoid()", "state = leave.sigmoid()"),
    ),
    "tagger_padding_read_first_backwards": Edit(
        "turned = torch.where(real, sizes[:, None] - 1 - places, places)[..., None]",
        "turned = places.flip(0).expand_as(words)[..., None]",
        reference=("packed = pack_padded_sequence(", "emissions = 3 * self.hidden2tag("),
        at=("both = torch.stack([x", "gates = torch.einsum(", "return torch.cat([onward"),
    ),
    "tagger_second_bias_forgotten": Edit(
        'self.w("lstm_bias_ih", name) + self.w("lstm_bias_hh", name) for',
        'self.w("lstm_bias_ih", name) for',
        reference=("emissions = 3 * self.hidden2tag(",),
        at=("gates = torch.einsum(",),
    ),
    "tagger_transitions_turned": Edit(
        'moved = share @ self.w("crf.transitions").exp()',
        'moved = share @ self.w("crf.transitions").T.exp()',
        reference=("emissions[i].unsqueeze(1)\n            next_score = torch.logsumexp(",),
    ),
    "tagger_end_of_the_padded_row": Edit(
        "last = marks - F.pad(marks[:, 1:].sum(2), (0, 1))[..., None] * marks",
        "last = F.one_hot(tags[:, -1:], TAGS).float()",
        reference=("last_tags = tags[mask", "return score + self.end_transitions[last_tags]"),
        at=("good = good + last.sum(1)",),
    ),
    "pointnet_shares_of_plain_distances": Edit(
        "near.square() + 1e-8",
        "near + 1e-8",
        reference=("dists, idx = (", "dist_recip = 1.0 /", "weight = dist_recip /"),
    ),
    "pointnet_places_not_relative": Edit(
        "torch.cat([places[order] - places[chosen, None],",
        "torch.cat([places[order],",
        reference=("grouped_xyz = index_points(", "new_points = torch.cat([grouped_xyz"),
    ),
    "pointnet_nearest_in_place_of_first": Edit(
        "order = inside.long().argsort(dim=1, descending=True, stable=True)",
        "order = space[chosen].argsort(dim=1)",
        reference=(
            "group_idx = group_idx.sort(",
            "return torch.where(group_idx ==",
            "grouped_xyz = index_points(",
            "new_points = torch.cat([grouped_xyz",
        ),
        at=("order = torch.where(", "y = torch.cat([places[order]"),
    ),
    "pointnet_norms_with_the_epsilon_of_another_library": Edit(
        "(bn.running_var + EPS)",
        "(bn.running_var + 1e-3)",
        reference=(
            "new_points = F.relu(bn(",
            "return F.relu(self.mlp_bn(",
            "self.mlp_bns = ",
            "self.mlp_conv, self.mlp_bn = ",
        ),
        at=(
            "shift = bn.bias +",
            "self.layers[name] = conv",
            "y = (y @ matrix + shift).relu()",
            "return (known @ matrix",
        ),
    ),
    "pointnet_farthest_from_the_last_alone": Edit(
        "space[chosen].amin(0).argmax()",
        "space[chosen[-1]].argmax()",
        reference=(
            "distance = torch.where(dist",
            "centroids.append(",
            "return torch.stack(centroids",
            "new_xyz = index_points(",
        ),
        at=("return torch.tensor(chosen), space", "inside = space[chosen]"),
    ),
    "ema_step_without_looking_ahead": Edit(
        "rate * (slope + MOMENTUM * velocity[name])",
        "rate * velocity[name]",
        reference=("optimizer.step()", "optimizer = torch.optim.SGD("),
    ),
    "ema_decay_of_norms_and_biases": Edit(
        "(DECAY * weight if weight.dim() > 1 else 0)",
        "DECAY * weight",
        reference=("optimizer.step()", "others = [p for p", "groups = [{"),
        at=("velocity[name] = MOMENTUM", "weights = weights | {name"),
    ),
    "ema_kept_variance_biased": Edit(
        "variance.detach() * count / (count - 1)",
        "variance.detach()",
        reference=("x = F.max_pool2d(F.relu(self.bn1(", "x = F.relu(x + self.bn2("),
        at=("stats = stats | {k",),
    ),
    "ema_slow_copy_of_the_weights_before_the_step": Edit(
        "weights | stats\n        slow",
        "{name: leaf.detach() for name, leaf in leaves.items()} | stats\n        slow",
        reference=("ema.update(model)", "model_v = model.state_dict()[name]", "ema_v.copy_("),
        at=("slow = {name: torch.lerp(",),
    ),
    "ema_parts_summed_not_averaged": Edit(
        "objective(logits, targets) / len(parts)",
        "objective(logits, targets)",
        reference=("loss = criterion(",),
    ),
}

LEGAL = {
    "sam_distances_added_to_the_scores": Edit(
        """far = torch.einsum("nhqd,qdk->nhqk", q, torch.cat([down, along], -1))
        marks = torch.eye(height).repeat_interleave(width, 0), torch.eye(width).repeat(height, 1)
        q, marks = torch.cat([q / DIM**0.5, far], -1), torch.cat(marks, 1).expand(*k.shape[:3], -1)
        mixed = F.scaled_dot_product_attention(q, torch.cat([k, marks], -1), v, scale=1.0)""",
        """rows, columns = (torch.einsum("nhqd,qdk->nhqk", q, table) for table in (down, along))
        bias = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)""",
    ),
    "sam_norm_by_the_library": Edit(
        'return F.rms_norm(centred, weight.shape, weight, 1e-6) + self.w(*name, "bias")',
        'return F.layer_norm(x, weight.shape, weight, self.w(*name, "bias"), 1e-6)',
    ),
    "sam_last_filter_tap_by_tap": Edit(
        """x = torch.einsum("nchwij,ocij->nhwo", near, self.neck_2_weight) + self.neck_2_bias""",
        """taps = near.permute(4, 5, 0, 2, 3, 1) @ self.neck_2_weight.permute(2, 3, 1, 0)[:, :, None, None]
        x = taps.sum((0, 1)) + self.neck_2_bias""",
    ),
    "policy_line_through_two_guesses": Edit(
        "aim = torch.lerp(before, clean, 1 + pace / 2)",
        "aim = (1 + pace / 2) * clean - pace / 2 * before",
    ),
    "policy_filter_by_the_library": Edit(
        "x = self.dense(F.pad(x, (0, 0, 2, 2)).unfold(1, 5, 1).flatten(2), *name, 0)",
        'x = F.conv1d(x.mT, self.w(*name, 0, "weight"), self.w(*name, 0, "bias"), padding=2).mT',
    ),
    "policy_one_plan_after_another": Edit(
        "self.noise(x, time, seen)) / self",
        "torch.cat([self.noise(a, time, b) for a, b in zip(x.split(1), seen.split(1))])) / self",
    ),
    "deltanet_answers_from_the_old_memory": Edit(
        """memory = memory + news[..., None] * key[:, t, :, None, None]
            said.append(torch.einsum("nghvk,ngk->nghv", memory, query[:, t]))""",
        """near = (key[:, t] * query[:, t]).sum(-1)[..., None, None]
            said.append(torch.einsum("nghvk,ngk->nghv", memory, query[:, t]) + near * news)
            memory = memory + torch.einsum("nghv,ngk->nghvk", news, key[:, t])""",
    ),
    "deltanet_filter_by_the_library": Edit(
        """wide = sum(taps[j] * queue[:, j : j + LENGTH] for j in range(KERNEL))""",
        """wide = F.conv1d(queue.mT, taps.T[:, None], groups=taps.shape[1]).mT""",
    ),
    "hifigan_stretched_by_the_library": Edit(
        """spread = torch.einsum("btc,cok->btko", x, kernel)
        places = (rate * torch.arange(frames)[:, None] + torch.arange(size)).flatten()
        total = x.new_zeros(len(x), rate * (frames - 1) + size, channels)
        total = total.index_add(1, places, spread.flatten(1, 2))""",
        """total = F.conv_transpose1d(x.mT, kernel, stride=rate).mT""",
    ),
    "hifigan_filters_tap_by_tap": Edit(
        "return torch.cat(taps, -1) @ kernel.permute(2, 1, 0).flatten(0, 1) + self.bias[name]",
        "return sum(y @ w.T for y, w in zip(taps, kernel.unbind(2))) + self.bias[name]",
    ),
    "modernbert_attention_by_the_library": Edit(
        """scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", share, v).flatten(1)""",
        """q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1)""",
    ),
    "modernbert_turned_as_complex_numbers": Edit(
        "q, k = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)",
        """turned = torch.complex(low, high) * torch.complex(cos, sin)
        q, k = torch.cat([turned.real, turned.imag], -1)""",
    ),
    "modernbert_words_fed_forward_in_parts": Edit(
        "x = x + (gate * F.gelu(value)) @ self",
        "x = x + torch.cat([g * F.gelu(v) for g, v in zip(gate.split(8), value.split(8))]) @ self",
    ),
    "tagger_word_and_state_in_one_product": Edit(
        """gates = torch.einsum("dnti,dig->tdng", both, into) + torch.stack(biases)[:, None]
        state = cell = x.new_zeros(2, len(x), HIDDEN)
        states = []
        for gate in gates:
            enter, forget, new, leave = torch.baddbmm(gate, state, back).split(HIDDEN, -1)""",
        """bias, rows = torch.stack(biases)[:, None], torch.cat([into, back], 1)
        state = cell = x.new_zeros(2, len(x), HIDDEN)
        states = []
        for word in both.unbind(2):
            gates = torch.cat([word, state], -1) @ rows + bias
            enter, forget, new, leave = gates.split(HIDDEN, -1)""",
    ),
    "tagger_scores_of_scaled_weights": Edit(
        'scores = 3 * F.linear(x, self.w("hidden2tag.weight"), self.w("hidden2tag.bias"))',
        'scores = F.linear(x, 3 * self.w("hidden2tag.weight"), 3 * self.w("hidden2tag.bias"))',
    ),
    "tagger_sums_by_logarithms": Edit(
        """moved = share @ self.w("crf.transitions").exp() * scores[:, t].exp()
            share = torch.where(real[:, t, None], moved, share)""",
        """moved = share.log()[:, :, None] + self.w("crf.transitions") + scores[:, t, None]
            share = torch.where(real[:, t, None], moved.logsumexp(1).exp(), share)""",
    ),
    "pointnet_projected_before_gathered": Edit(
        """y = torch.cat([places[order] - places[chosen, None], values[order]], -1)
        for i in (0, 1):
            matrix, shift = self.layers[f"{part}.mlp_{{}}s.{i}"]
            y = (y @ matrix + shift).relu()""",
        """(first, shift), (matrix, last) = (self.layers[f"{part}.mlp_{{}}s.{i}"] for i in (0, 1))
        y = (torch.cat([places, values], 1) @ first)[order] + shift
        y = (y - (places[chosen] @ first[:3])[:, None]).relu()
        y = (y @ matrix + last).relu()""",
    ),
    "pointnet_shares_by_a_softmax": Edit(
        "shares = F.normalize(1 / (near.square() + 1e-8), p=1, dim=1)",
        "shares = (-(near.square() + 1e-8).log()).softmax(1)",
    ),
    "ema_surprise_by_logsumexp": Edit(
        "return -(goal * logits.log_softmax(1)).sum(1).mean()",
        "return logits.logsumexp(1).mean() - (goal * logits).sum() / len(logits)",
    ),
    "ema_filters_by_the_library": Edit(
        """patches = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, stride).unfold(2, 3, stride)
    return torch.einsum("nhwcij,ocij->nhwo", patches, kernel)""",
        """return F.conv2d(x.permute(0, 3, 1, 2), kernel, None, stride, 1).permute(0, 2, 3, 1)""",
    ),
    "ema_parts_in_one_backward": Edit(
        """slopes = torch.autograd.grad(loss, list(leaves.values()))
            total = {name: total[name] + g for name, g in zip(total, slopes, strict=True)}
            losses.append(loss.detach())""",
        """losses.append(loss)
        slopes = torch.autograd.grad(sum(losses[-len(parts) :]), list(leaves.values()))
        total = dict(zip(total, slopes, strict=True))""",
    ),
}
