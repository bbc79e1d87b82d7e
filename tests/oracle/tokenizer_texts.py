"""Texts on which tokenizers tend to differ, made deterministically."""

# ruff: noqa: RUF001 - look-alike letters are meant here

from __future__ import annotations

import random
from collections.abc import Sequence

PROSE = (
    "The harbour was quiet that morning, and nobody had told the gulls.",
    "I'm sure they've said we'll go; he'd rather she didn't, but it's Jane's idea, isn't it?",
    "I'M SURE THEY'VE SAID WE'LL GO; HE'D RATHER SHE DIDN'T, BUT IT'S JANE'S IDEA.",
    "“Curly quotes”, ‘single ones’, an em dash—like this—and an ellipsis…",
    'He said: "Twelve o\'clock!" (Or was it 12:00?) [sic] {really} <maybe>',
    "Il était une fois, à l'orée du bois, une forêt où l'on n'entendait que le vent.",
    "Übergrößenträger fahren öfter über die Straße als ein Bär im Käfig.",
    "¿Dónde está la biblioteca? ¡Mañana será otro día, señor Muñoz!",
    "Příliš žluťoučký kůň úpěl ďábelské ódy; zażółć gęślą jaźń.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "Thuyền đi chậm qua những cánh đồng lúa xanh mướt.",
    "İstanbul'da ılık bir ağustos akşamı, çiğ köfte ve şalgam.",
    "Antidisestablishmentarianism and pneumonoultramicroscopicsilicovolcanoconiosis",
    "One sentence.Another without a space.And a third!?!?",
)

SCRIPTS = (
    "我昨天在图书馆借了三本书，今天就看完了。",
    "繁體中文與简体中文混合，標點「引號」、頓號；冒號：句號。",
    "東京都は日本の首都です。カタカナとひらがな、ｶﾀｶﾅも。",
    "나는 어제 친구와 함께 바닷가를 걸었다. 날씨가 참 좋았어요!",
    "한국어 문장과 English words를 섞어 쓰면 2배로 어렵다.",
    "ذهبتُ إلى السوق صباحًا واشتريتُ خبزًا وتمرًا.",
    "السنة ٢٠٢٦ والساعة ١٢:٣٠، هل أنت مستعد؟",
    "הילד הלך לים ומצא צדף קטן בחול.",
    "שָׁלוֹם עֲלֵיכֶם",
    "ฉันชอบกินข้าวเหนียวมะม่วงในวันที่อากาศร้อน",
    "मैं कल बाज़ार गया था और ताज़े आम लाया। क्या आप खाएँगे?",
    "আমি বাংলায় গান গাই",
    "நான் தமிழில் எழுதுகிறேன்",
    "ქართული ენა და հայերեն լեզու",
    "አማርኛ ᚠᚢᚦᚨᚱᚲ ᏣᎳᎩ ᓀᐦᐃᔭᐍᐏᐣ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕕𝕠𝕦𝕓𝕝𝕖 𝓼𝓬𝓻𝓲𝓹𝓽 𝟙𝟚𝟛",
    "𠀀𠀁𠮷野家 𒀀𒁉 𓀀𓂀",
)

EMOJI = (
    "😀😃😄 a smile 🙂",
    "👩‍👩‍👧‍👦 family, 👨🏽‍🚀 astronaut, 🧑🏿‍🤝‍🧑🏻 friends",
    "👍🏻👍🏼👍🏽👍🏾👍🏿",
    "🇫🇷🇩🇪🇰🇷🏴‍☠️🏳️‍🌈🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "❤️‍🔥 vs ❤ vs ♥️; ☎️ 1️⃣ #️⃣ *️⃣",
    "🫠🫡🩷 new ones; ⌛⏳ old ones",
    "text👋text 🎉🎉🎉! (🚀)",
)

CODE = (
    "def add(a: int, b: int) -> int:\n    return a + b  # sum\n",
    "class Foo(Bar):\n\tdef __init__(self, *args, **kwargs):\n\t\tsuper().__init__(*args)\n",
    "for (int i = 0; i < n; ++i) {\n    sum += x[i] * 0x1F;\n}\n",
    'fn main() {\n    let v: Vec<u8> = vec![1, 2, 3];\n    println!("{:?}", v);\n}\n',
    "const f = async (x) => { await g(`${x}!`); return x?.y ?? null; };\r\n",
    'SELECT id, COUNT(*) FROM "orders" WHERE total >= 99.50 GROUP BY id;',
    "#!/bin/sh\nset -eu\nfind . -name '*.py' | xargs grep -n \"TODO\" >/dev/null 2>&1 || true\n",
    '<div class="a b" id=\'c\'><a href="/x?y=1&amp;z=2">link</a></div>\n',
    '{"key": [1, 2.5e-3, null, true], "nested": {"s": "\\u00e9\\n"}}',
    "\\begin{equation}\n  \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}\n\\end{equation}",
    "| a | b |\n|---|:-:|\n| 1 | `x` |\n\n- [ ] task\n  1. **bold** _it_\n",
    'package main\n\nimport "fmt"\n\nfunc main() {\n\tfmt.Println("hi")\n}\n',
    "template <typename T> auto f(T&& t) -> decltype(std::forward<T>(t)) { return t; }",
    "main = mapM_ print $ takeWhile (<100) [x^2 | x <- [1..], odd x] -- squares",
    "x=1;y=-2;z=x**y%3;a=b!=c;d<<=4;e>>>=1;f=>g;h->i;j::k;l...m",
    "matrix = [\n    [ 1,  2,  3],\n    [10, 20, 30],\n]\n",
)

NUMBERS = (
    "0 1 12 123 1234 12345 123456 1234567890",
    "3.14159 -2.5 +7 1e10 6.02e23 0x1F 0b1010 1_000_000 1,234,567.89",
    "2026-11-29T13:45:07.123Z +49 (0)30 1234-5678 192.168.0.1 10:30",
    "v1.2.3-rc4 5kg 20€ $19.99 ¥5000 50% 1/2 ½ ¾ x² H₂O Ⅷ ①",
    "a1b2c3 abc123def 1st 2nd 3rd 100th 007",
    "١٢٣ १२३ １２３ 一二三",
)

SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\t\t\t",
    "\n",
    "\n\n",
    "\n\n\n\n",
    "\r\n",
    "\r\n\r\n",
    "\r",
    " \n ",
    "\n \n\t\n",
    "a  b   c    d     e",
    "  leading",
    "trailing  ",
    "trailing newline\n",
    "tab\tbetween\t\twords",
    "\u00a0nbsp\u00a0\u2003em\u3000ideographic\u2028line\u2029par",
    " " * 15,
    " " * 100,
    "\t" * 40,
    "\n" * 40,
    "    \t  mixed \t indent\n",
    "x =  5\n  3    7\n",
)

ODDITIES = (
    "",
    "a",
    "\x00",
    "\x00\x01\x02\x7f\x80\x9f",
    "\x1b[31mred\x1b[0m",
    "e\u0301 vs é; a\u0308\u0304; n\u0303o; \u0301 alone",
    "Z\u0351\u0363a\u0342\u0303l\u0313\u0359g\u0331o\u0336\u0489",
    "\ufeffbyte order mark",
    "zero\u200bwidth\u200cnon\u200djoin \u202ertl\u202c \u2066iso\u2069",
    "\ufffd replaced \ufffe \uffff",
    "ﬁ ligature, Ǆ, ß, ẞ, İ, ı, K, Å",
    "a" * 500,
    "xyzzy" * 120,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2,
    "!" * 60 + "?" * 60,
    "=" * 80 + "\n" + "-" * 80 + "\n" + "#" * 80,
    "https://example.com/a/b%20c?q=1&r=%E2%9C%93#frag-2 http://user:pw@[::1]:8080/",
    "mail someone@example.org, see www.example.net/~me/index.html;",
    "C:\\Users\\me\\file.txt /usr/local/bin/../lib ./a/./b",
    "$%^&*()_+{}|:\"<>?~`-=[]\\;',./",
    "'s't're've'm'll'd 'S 'T 'RE",
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E",
    "d41d8cd98f00b204e9800998ecf8427e",
)

# Ranges of code points from which random words are drawn.
_RANGES = (
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x370, 0x52F),
    (0x590, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE7F),
    (0x1100, 0x11FF),
    (0x2000, 0x206F),
    (0x2190, 0x27BF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xFE00, 0xFE0F),
    (0x1F300, 0x1FAFF),
)

_SEPARATORS = ("", " ", "  ", "\n", "\n\n", "\t", ", ", " \n", "\r\n", "   ", ". ")


def special_token_texts(special_tokens: Sequence[str]) -> list[str]:
    """Texts in which special tokens are written out, whole, broken and next to each other."""
    texts = [f"<|user|>{token}" for token in special_tokens]
    for token in special_tokens:
        texts += [
            token,
            f" {token} ",
            f"a{token}b",
            f"{token}{token}",
            f"\n{token}\n\n{token}",
            token[:-1],
            token[1:],
            token.upper(),
            f"{token[:2]} {token[2:]}",
        ]
    first, last = special_tokens[0], special_tokens[-1]
    texts.append(
        f"{first}system\nBe brief.{last}\n{first}user\nHi  there 👋🏽{last}\n{first}assistant\n"
    )
    return texts


def snippets() -> list[str]:
    """Every text of this file as it stands."""
    return [*PROSE, *SCRIPTS, *EMOJI, *CODE, *NUMBERS, *SPACES, *ODDITIES]


def tokenizer_texts(special_tokens: Sequence[str], num_composed: int) -> list[str]:
    """The snippets, the special tokens as text, and `num_composed` random compositions of them."""
    generator = random.Random(20260101)
    plain = snippets()
    special = special_token_texts(special_tokens)
    texts = plain + special
    short = [text for text in texts if len(text) <= 100]
    for index in range(num_composed):
        kind = index % 4
        if kind == 0:
            texts.append(_joined(generator, short))
        elif kind == 1:
            texts.append(_joined(generator, [_fragment(generator, short) for _ in range(6)]))
        elif kind == 2:
            texts.append(_random_words(generator))
        else:
            texts.append(_random_spacing(generator))
    return list(dict.fromkeys(texts))


def _joined(generator: random.Random, parts: Sequence[str]) -> str:
    chosen = [generator.choice(parts) for _ in range(generator.randint(2, 4))]
    return "".join(part + generator.choice(_SEPARATORS) for part in chosen)


def _fragment(generator: random.Random, parts: Sequence[str]) -> str:
    text = generator.choice(parts)
    start = generator.randint(0, len(text))
    return text[start : start + generator.randint(1, 12)]


def _random_words(generator: random.Random) -> str:
    words = []
    for _ in range(generator.randint(1, 5)):
        low, high = generator.choice(_RANGES)
        length = generator.randint(1, 8)
        words.append("".join(chr(generator.randint(low, high)) for _ in range(length)))
    return generator.choice(_SEPARATORS).join(words)


def _random_spacing(generator: random.Random) -> str:
    pieces = []
    for _ in range(generator.randint(2, 6)):
        pieces.append(
            generator.choice((" ", "\t", "\n", "\r\n", "\u00a0")) * generator.randint(1, 9)
        )
        pieces.append(generator.choice(("if", "12", "the", "}", "é", "中", "//", "'s", "")))
    return "".join(pieces)
