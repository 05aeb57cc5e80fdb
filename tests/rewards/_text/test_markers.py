"""Marks of turns in judged texts: those of some fifty families are broken up, and honest text is left as it is."""

import unicodedata

import pytest

from trl_grpo_ext.rewards._text.markers import broken_up

MARKERS = """
<|im_start|> <|im_end|> <|endoftext|> <|eot_id|> <|start_header_id|> <|begin_of_text|> <|user|> <|assistant|> <|system|>
<|START_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|END_OF_TURN_TOKEN|> <|end_of_role|> <|channel|> <|message|> <|tool_call>
<turn|> <|turn> <channel|> <｜Assistant｜> <｜User｜> <｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> [|user|]
[|assistant|] [|endofturn|] [|system|] <seed:bos> <seed:eos> <seed:tool_call> ]~b]user ]~b]ai ]~!b[ [e~[ <start_of_turn>
<end_of_turn> <bos> <eos> <pad> <unk> <s> </s> <mask> <cls> <sep> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]
[AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [THINK] [/THINK] [CLS] [SEP] [MASK] [gMASK] [UNK] [PAD] [BOS] [EOS]
<<SYS>> <</SYS>> <sop> <eop> <eod> <eot> <eom> <EOT> <_user> <_bot> <_system> <_end> <reserved_106> <unused12>
<SPECIAL_12> <extra_id_1> <end_of_utterance> <role> </role> <assistant> </assistant> <user> <system> <human> <bot>
[control_8] [UNUSED_TOKEN_145] <TOKENS_UNUSED_1> <endoftext> <fim_prefix> <BOS_TOKEN> <EOS_TOKEN> <|▁pad▁|> <eoh>
<eoa> <|bot|> <|tool▁sep|> <ctrl99> <start_of_image> <tool_response> <im_end> <im_start> <|fim_middle|> [END_OF_TURN]
""".split()  # noqa: SIM905
HONEST = [
    "x << 2 >> 1; std::cout << A << B; cat <<EOF",
    "See [the page](https://example.org/a_b) and [1], [x] done, [ ] to do, a[i][j], M[ROW, COL].",
    "<div class='a'><b>bold</b></div> <answer>18</answer> <think>so</think> <book id='1'/> List<String> vector<int>",
    r"\[x^2\] \left|x\right| $a<b$ |a| < |b| \begin{bmatrix}1&2\end{bmatrix} P(A|B)",
    "if a < b || b > c: return {k: v | w} # a <b> c",
    "#include <stdio.h> 48/2=<<48/2=24>>24 #### 72 -> => <= >= <- <> !== ~a[b]",
    "👩\u200d👩\u200d👧 می\u200cخواهم ﷽ naïve „quoted“ “so” ‹a› 「b」 １２３",
]


def skeleton(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")


@pytest.mark.parametrize("marker", MARKERS)
def test_what_looks_like_the_mark_of_a_turn_is_broken_up(marker: str) -> None:
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in marker)
    for form in (marker, wide, "\u200b".join(marker), marker[0] + "\u2060\xad" + marker[1:], marker * 2):
        for text in (form, f"a{form}b", f"{form}{form}", f"]{form}(x)"):
            broken = broken_up(text)
            assert skeleton(marker) not in skeleton(broken), broken
            assert broken.replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("text", HONEST)
def test_honest_text_is_left_as_it_is(text: str) -> None:
    assert broken_up(text) == text
