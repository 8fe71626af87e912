from quartet.services.cli.main import main

raise SystemExit(main())
