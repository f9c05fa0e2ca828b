package dev.moorage.example;

import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Runs the example against the server named by MOORAGE_SERVER, in a pool of its own. */
class RouterTest {
    private static final Map<String, String> ENDS = Map.of(
            "steady", "COMPLETED: released",
            "second", "COMPLETED: released",
            "third", "COMPLETED: released",
            "broken", "FAILED: released",
            "impatient", "ABORTED: released",
            "hasty", "ABORTED: ",
            "giant", "FAILED: nothing to release",
            "wrong", "FAILED: nothing to release");

    @Test
    @Timeout(120)
    void everyRolloutEndsAsItShould() throws Exception {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        Router.demonstrate(new PrintStream(printed, true, StandardCharsets.UTF_8), Optional.empty());
        String text = printed.toString(StandardCharsets.UTF_8);
        List<String> lines = text.lines().toList();

        ENDS.forEach((session, end) -> {
            String last = lines.stream()
                    .filter(line -> line.startsWith(session + ": "))
                    .reduce("", (earlier, later) -> later);
            assertTrue(last.startsWith(session + ": " + end), session + " ended with " + last);
        });
        for (String pattern : List.of(
                "giant: .*TOO_LARGE.*",
                "wrong: failed: .*\\[INVALID_FIELD]",
                "wrong:   prompt_tokens: must be at most 2\\^40.*",
                "[1-9][0-9]* renewals")) {
            assertTrue(lines.stream().anyMatch(line -> line.matches(pattern)), pattern + " is not in " + text);
        }
    }
}
