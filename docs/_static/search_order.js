// Sphinx's weights of a search, with programs and answers before pages for developers where the words are found in both.
const FIRST = ["tasks/", "faq", "quickstart", "checkpoints", "many-devices"];
// Troubleshooting has a heading for whatever can fail.
const LAST = ["troubleshooting", "architecture", "contributing", "benchmarks", "checkpoint-format", "own-strategies", "bagua"];
const begins = (page, names) => names.some((name) => page.startsWith(name));
const asked = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().match(/\w+/g) ?? [];
const isAbout = (title) => asked.every((word) => title.toLowerCase().includes(word.replace(/s$/, "")));

var Scorer = {
    score: ([page, title, anchor, description, score]) =>
        score + (begins(page, FIRST) ? 3 : begins(page, LAST) ? -3 : 0) + (isAbout(title) ? 8 : 0),
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 15, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
};
