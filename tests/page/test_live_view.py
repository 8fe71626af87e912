"""The live view in a browser: a scripted feed, and what is seen of it."""

import re

from page.conftest import PHONE
from playwright.sync_api import expect
from support.live_script import Script

# The colour that the grid has in the middle of a block.
PIXEL = """id => {
    const grid = document.querySelector('.pool .grid:not(.layer)');
    const width = grid.parentElement.clientWidth, ratio = grid.width / width;
    const cell = [16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2].find((cell) =>
        Math.ceil(window.numBlocks / Math.floor(width / cell)) * cell <= (width < 600 ? 260 : 300)) ?? 2;
    const columns = Math.floor(width / cell);
    const at = (n) => Math.floor((n * cell + cell / 2 - 0.5) * ratio);
    const [x, y] = [at((id - 1) % columns), at(Math.floor((id - 1) / columns))];
    const [r, g, b] = grid.getContext('2d').getImageData(x, y, 1, 1).data;
    return '#' + [r, g, b].map((c) => c.toString(16).padStart(2, '0')).join('');
}"""
COLOUR = "state => getComputedStyle(document.documentElement).getPropertyValue(`--block-${state}`).trim()"
FREE, CACHED, OWNED, SHARED_2, SHARED_4, SHARED_MORE = range(6)


def look(server, open_page, script, viewport=None, **options):
    server.live.first = [("snapshot", script.snapshot())]
    options["allowed"] = [*options.get("allowed", ()), "willReadFrequently"]  # tests read pixels
    page = open_page(f"{server.url}#live", viewport, **options)
    expect(page.locator(".request").first).to_be_visible()
    page.evaluate("n => { window.numBlocks = n; }", script.num_blocks)
    return page


def shows(page, block, state):
    """The block is painted in the state's colour. Waits for the next frames."""
    page.wait_for_function(
        f"([id, state]) => ({PIXEL})(id) === ({COLOUR})(state)", arg=[block, state], polling=50, timeout=10_000
    )


def test_blocks_are_coloured_by_their_state_and_change(server, open_page):
    script = Script(num_blocks=1500)
    page = look(server, open_page, script)
    states = {}
    for block, (ref_cnt, name, _, _) in script.blocks.items():
        states[block] = CACHED if ref_cnt == 0 and name else OWNED if ref_cnt == 1 else SHARED_MORE
    for block in (1, 4, 5, 200, max(script.blocks)):
        shows(page, block, states[block])
    shows(page, 1500, FREE)
    used = sum(block[0] > 0 for block in script.blocks.values())
    expect(page.locator(".pool .summary")).to_have_text(f"{used} of 1,500 blocks in use, {100 * used / 1500:.0f} %")

    changed = {5: [2, "00000001", 4, 0], 6: [4, "00000002", 5, 0], 1400: [1, "", -1, 0], 7: [0, "", -1, 0]}
    server.say("delta", script.event(blocks=script.columns(changed)))
    for block, state in ((5, SHARED_2), (6, SHARED_4), (1400, OWNED), (7, FREE), (8, states[8]), (1500, FREE)):
        shows(page, block, state)


def test_a_hundred_thousand_blocks_are_drawn(server, open_page):
    script = Script(num_blocks=100_000)
    page = look(server, open_page, script)
    shows(page, 1, SHARED_MORE)
    shows(page, 100_000, FREE)
    server.say("delta", script.event(blocks=script.columns({99_999: [1, "", -1, 0]})))
    shows(page, 99_999, OWNED)
    # Cells without a gap: the neighbours are as they were.
    shows(page, 99_998, FREE)
    assert page.locator(".pool .grid").first.bounding_box()["height"] < 800


def test_a_request_shows_its_block_table_from_logical_to_physical(server, open_page):
    script = Script()
    page = look(server, open_page, script)
    running = [request for request in script.requests.values() if request["state"] == "running"]
    request = running[2]
    table = request["block_table"]["ids"]
    row = page.locator(".request", has_text=request["key"][:8])
    row.hover()
    expect(page.locator(".block-table h3")).to_have_text(f"Block table of {request['key'][:8]}")
    cells = page.locator(".table-cells li")
    expect(cells).to_have_text([f"{logical}{physical}" for logical, physical in enumerate(table)])
    expect(cells.first).to_have_attribute("title", f"logical block 0 is physical block {table[0]}, shared by 24")
    page.mouse.move(5, 5)
    expect(cells.first).to_be_hidden()

    row.click()
    page.mouse.move(5, 5)
    expect(row).to_have_attribute("aria-selected", "true")
    expect(cells).to_have_count(len(table))
    # It grows, is preempted, comes back with another table, and ends.
    told = {"key": request["key"], "state": "running"}
    server.say("delta", script.event(requests=[told | {"block_table": {"from": len(table), "ids": [1999]}}]))
    expect(cells.last).to_have_text(f"{len(table)}1999")
    server.say("delta", script.event(requests=[told | {"state": "preempted", "block_table": {"from": 0, "ids": []}}]))
    expect(row.locator(".request-state")).to_have_text("preempted")
    expect(page.locator(".block-table")).to_contain_text("It holds no block now.")
    again = {"num_preemptions": 1, "block_table": {"from": 0, "ids": [11, 12]}}
    server.say("delta", script.event(requests=[told | again]))
    expect(cells).to_have_text(["011", "112"])
    expect(row.locator(".request-state")).to_have_text("running, came back")
    server.say("delta", script.event(requests=[{"key": request["key"], "state": "finished"}]))
    expect(row).to_have_count(0)
    expect(page.locator(".block-table")).to_contain_text("Point at a request")


def test_a_block_tells_what_it_holds(server, open_page):
    script = Script()
    page = look(server, open_page, script)
    info = page.locator(".pool .info")
    page.locator(".pool .layer").hover(position={"x": 4, "y": 4})
    expect(info).to_contain_text(f"Block 1 · shared by 24 · hash {script.blocks[1][1]} · 23 hits · logical 0 of")
    expect(info).to_contain_text("and 21 more")
    assert page.locator(".request.holds").count() == 24
    page.mouse.move(5, 5)
    expect(info).to_contain_text("16 tokens a block")
    page.locator(".pool .layer").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    expect(info).to_contain_text("Block 5 · owned")
    expect(page.locator(".request.holds")).to_have_count(1)


def test_steps_are_bars_against_the_budget(server, open_page):
    script = Script()
    page = look(server, open_page, script)
    info = page.locator(".steps .info")
    expect(info).to_contain_text(f"Step {script.num_steps}:")
    server.say("delta", script.event(steps=[script.step(prefill=160)]))
    expect(info).to_contain_text(f"Step {script.num_steps}: 160 prefill + 24 decode · 24 running · 4 waiting")
    canvas = page.locator(".steps-canvas")
    box = canvas.bounding_box()
    # Heights of the last bar, by its colours.
    heights = """canvas => {
        const { data } = canvas.getContext('2d').getImageData(canvas.width - 4, 0, 1, canvas.height);
        const count = (name) => {
            const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
            const rgb = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
            let n = 0;
            for (let i = 0; i < data.length; i += 4) n += rgb.every((c, j) => Math.abs(data[i + j] - c) < 4);
            return n;
        };
        return [count('--prefill'), count('--decode')];
    }"""
    prefill, decode = canvas.evaluate(heights)
    scale = (box["height"] - 16) / 256
    assert abs(prefill - 160 * scale) <= 2 and abs(decode - 24 * scale) <= 2
    canvas.hover(position={"x": box["width"] - 10, "y": 100})
    expect(info).to_contain_text(f"Step {script.num_steps - 1}:")
    canvas.focus()
    page.keyboard.press("ArrowLeft")
    expect(info).to_contain_text(f"Step {script.num_steps - 2}:")
    page.mouse.move(5, 5)
    server.say("delta", script.event(steps=[script.step(lost=True)]))
    page.locator(".pool .layer").focus()
    expect(info).to_contain_text("lost with its executor")


def test_figures_of_the_line(server, open_page):
    script = Script()
    page = look(server, open_page, script)
    for _ in range(10):
        server.say("delta", script.event(steps=[script.step()], **script.figures()))
    tiles = page.locator(".tile")
    expect(tiles.nth(0)).to_contain_text(re.compile(r"Output\d+(\.\d)?tokens/s"))
    expect(tiles.nth(1)).to_have_text("First token312 msp90 741 ms · p99 1.31 s")
    expect(tiles.nth(2)).to_have_text("Between tokens31 msp90 44 ms · p99 120 ms")
    expect(tiles.nth(3)).to_have_text("Found in the cache38 %1,500 of 4,000 tokens")
    expect(tiles.nth(4)).to_have_text(f"Preemptions1{script.num_steps} steps")
    expect(page.locator(".requests .summary")).to_have_text("24 of 256 running, 4 waiting, 1 preempted")
    none = {"count": 0, "p50": None, "p90": None, "p99": None}
    server.say("delta", script.event(latency={"window_s": 30, "ttft": none, "itl": none}))
    expect(tiles.nth(1)).to_have_text("First token–none yet")


def test_a_service_that_dies_is_seen_to_return(server, open_page):
    script = Script()
    page = look(server, open_page, script)
    card = page.locator(".service", has_text="executor")
    expect(page.locator(".service b")).to_have_text(["gateway", "tokenizer", "scheduler", "executor"])
    expect(card).to_contain_text("ready")
    expect(card.locator("code")).to_have_text("000004")
    server.say("delta", script.event(services=script.services(gone="executor")))
    expect(card).to_contain_text("gone for")
    script.incarnations["executor"] = "00000000000000aa"
    loading = script.services()
    loading[3]["ready"] = False
    server.say("delta", script.event(services=loading))
    expect(card).to_contain_text("not ready")
    server.say("delta", script.event(services=script.services()))
    expect(card).to_contain_text("back")
    expect(card.locator("code")).to_have_text("0000aa")
    expect(card.locator(".starts")).to_have_text("↻ 1")
    second = script.services()
    second.insert(2, second[1] | {"name": "tokenizer-18", "incarnation": "00000000000000bb"})
    server.say("delta", script.event(services=second))
    expect(page.locator(".service b")).to_have_text(["gateway", "tokenizer", "tokenizer", "scheduler", "executor"])
    server.say("delta", script.event(services=script.services()[:3]))
    expect(page.locator(".service").last).to_contain_text("not there")


def test_a_lost_connection_comes_back_by_itself(server, open_page):
    script = Script()
    page = look(server, open_page, script, allowed=["503 (Service Unavailable)"])
    expect(page.locator(".banner")).to_be_hidden()
    server.live.refuses = True
    server.do(server.live.drop)
    expect(page.locator(".banner")).to_contain_text("No connection: it restarts. Trying again")
    expect(page.locator(".request").first).to_be_visible()
    # What it tells then replaces all: the old requests are not there any more.
    other = Script(num_blocks=600, num_running=2, num_waiting=0, seed=2)
    server.live.first = [("snapshot", other.snapshot())]
    server.live.refuses = False
    expect(page.locator(".banner")).to_be_hidden()
    expect(page.locator(".request")).to_have_count(2)
    expect(page.locator(".pool .summary")).to_contain_text("of 600 blocks")


def test_the_feed_is_open_only_while_somebody_looks(server, open_page):
    page = open_page(server.url)
    expect(page.locator("#readiness")).to_have_text("Ready")
    assert server.live.num_viewers_ever == 0
    server.live.first = [("snapshot", Script().snapshot())]
    page.click("nav [data-view=live]")
    expect(page.locator(".request").first).to_be_visible()
    server.wait_for(lambda: len(server.live.viewers) == 1)
    page.click("nav [data-view=playground]")
    server.wait_for(lambda: not server.live.viewers)
    page.go_back()
    server.wait_for(lambda: len(server.live.viewers) == 1)
    hide = "seen => { Object.defineProperty(document, 'visibilityState', {value: seen, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, "hidden")
    server.wait_for(lambda: not server.live.viewers)
    page.evaluate(hide, "visible")
    server.wait_for(lambda: len(server.live.viewers) == 1)
    assert server.live.num_viewers_ever == 3


def test_the_prefix_tree_has_a_row_for_each_branch(server, open_page):
    script = Script(num_running=0, num_waiting=1)
    script.blocks = {
        1: [2, "aa000001", 0, 5],
        2: [2, "aa000002", 1, 5],
        3: [1, "aa000003", 2, 0],
        4: [1, "aa000004", 2, 3],
        5: [0, "aa000005", 4, 3],
        9: [0, "bb000001", 0, 0],
        12: [1, "", -1, 0],
    }
    page = look(server, open_page, script)
    info = page.locator(".prefixes .info")
    expect(info).to_have_text("2 first blocks · longest path 4 blocks.")
    expect(page.locator(".prefixes .summary")).to_have_text("6 blocks with a known prefix")
    canvas = page.locator(".prefix-canvas")
    assert canvas.bounding_box()["height"] == 3 * 16
    # The most hit first: 1, 2, 4, 5 in the first row, then the branch 3, then 9.
    texts = [
        "Blocks 0 to 1 of a prompt · shared by 2 · 5 hits · hash aa000001 · in block 1 and on",
        "Block 2 of a prompt · owned · 3 hits · hash aa000004 · in block 4",
        "Block 3 of a prompt · cached · 3 hits · hash aa000005 · in block 5",
        "Block 2 of a prompt · owned · 0 hits · hash aa000003 · in block 3",
        "Block 0 of a prompt · cached · 0 hits · hash bb000001 · in block 9",
    ]
    canvas.focus()
    for text in texts:
        page.keyboard.press("ArrowDown")
        expect(info).to_have_text(text)
    canvas.hover(position={"x": 2 * 14 + 5, "y": 16 + 8})
    expect(info).to_have_text(texts[3])


def test_without_requests_some_can_be_sent(server, open_page):
    script = Script(num_running=0, num_waiting=0)
    server.live.first = [("snapshot", script.snapshot())]
    page = open_page(f"{server.url}#live")
    page.click("#sample")
    server.wait_for(lambda: len(server.peer.sent) >= 8)
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_everything_fits_a_phone(server, open_page):
    page = look(server, open_page, Script(), PHONE, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    page.locator(".request").first.tap()
    expect(page.locator(".table-cells li").first).to_be_visible()
    page.locator(".pool .layer").tap(position={"x": 3, "y": 3})
    expect(page.locator(".pool .info")).to_contain_text("Block 1 ·")
